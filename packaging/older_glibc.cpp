// What headers of a newer glibc ask for and an older one lacks, for wheels that run on both: see
// PARISKV_GLIBC in cmake/python.cmake. Nothing here is seen outside the extension.

#define PKV_HIDDEN __attribute__((visibility("hidden")))

extern "C" {

struct stat;

// Since 2.33 these are functions of their own; before, headers made them calls of these.
constexpr int kStatVersion = 1;  // of x86-64
int __xstat(int version, const char* path, struct stat* out);
int __fxstat(int version, int file, struct stat* out);
int __lxstat(int version, const char* path, struct stat* out);

PKV_HIDDEN int older_stat(const char* path, struct stat* out) __asm__("stat");
PKV_HIDDEN int older_fstat(int file, struct stat* out) __asm__("fstat");
PKV_HIDDEN int older_lstat(const char* path, struct stat* out) __asm__("lstat");

int older_stat(const char* path, struct stat* out) { return __xstat(kStatVersion, path, out); }
int older_fstat(int file, struct stat* out) { return __fxstat(kStatVersion, file, out); }
int older_lstat(const char* path, struct stat* out) { return __lxstat(kStatVersion, path, out); }

// Of a part of glibc that is linked into every program, and not in what a linker reads of 2.28.
int __cxa_atexit(void (*function)(void*), void* argument, void* library);
extern void* __dso_handle PKV_HIDDEN;
PKV_HIDDEN int atexit(void (*function)()) {
  return __cxa_atexit(reinterpret_cast<void (*)(void*)>(function), nullptr, __dso_handle);
}

// Since 2.32 it may say that there is one thread, so that libstdc++ counts without atomics.
PKV_HIDDEN char __libc_single_threaded = 0;

}  // extern "C"
