//! The engine from Rust, by the C interface alone: one sequence, a prompt, decode steps, and the
//! program's own threads. With pariskv installed under PREFIX:
//!   rustc -O examples/rust/main.rs -L PREFIX/lib -C link-arg=-Wl,-rpath,PREFIX/lib -o example

use std::ffi::CStr;
use std::mem::{size_of, zeroed};
use std::os::raw::{c_char, c_void};
use std::ptr::{null, null_mut};

/// What this program calls of pariskv/c.h. Fields are those of the header, in its order.
mod ffi {
    use super::*;

    #[repr(C)]
    pub struct Tensor {
        pub size: usize,
        pub data: *mut c_void,
        pub dtype: i32,
        pub device: i32,
        pub device_index: i32,
        pub rank: i32,
        pub shape: [i64; 4],
        pub strides: [i64; 4],
    }

    #[repr(C)]
    pub struct Config {
        pub size: usize,
        pub layers: i64,
        pub query_heads: i64,
        pub kv_heads: i64,
        pub head_dim: i64,
        pub value_dim: i64,
        pub dtype: i32,
        pub kv_dtype: i32,
        pub regions: [i64; 4],
        pub policies: [*const c_void; 3],
        pub device: i32,
        pub device_index: i32,
        pub threads: i64,
        pub segment_tokens: i64,
        pub memory_budget: i64,
        pub host_budget: i64,
        pub row_cache: i64,
        pub placement: i32,
        pub reserved: i32,
        pub borrowed: *const c_void,
    }

    pub type Task = extern "C" fn(context: *mut c_void);

    #[repr(C)]
    pub struct Executor {
        pub size: usize,
        pub user: *mut c_void,
        pub run: extern "C" fn(user: *mut c_void, times: i64, task: Task, context: *mut c_void),
    }

    #[repr(C)]
    pub struct Resources {
        pub size: usize,
        pub memory: [*const c_void; 3],
        pub executor: *const Executor,
        pub should_stop: *const c_void,
        pub stop_user: *mut c_void,
    }

    #[repr(C)]
    pub struct Cache {
        private: [u8; 0],
    }

    #[repr(C)]
    pub struct Batch {
        private: [u8; 0],
    }

    #[link(name = "pariskv")]
    extern "C" {
        pub fn pariskv_version() -> *const c_char;
        pub fn pariskv_last_error() -> *const c_char;
        pub fn pariskv_config_init(config: *mut Config, size: usize) -> i32;
        pub fn pariskv_tensor_init(
            tensor: *mut Tensor,
            size: usize,
            data: *mut c_void,
            dtype: i32,
            rank: i32,
            shape: *const i64,
        ) -> i32;
        pub fn pariskv_cache_create(
            config: *const Config,
            resources: *const Resources,
            cache: *mut *mut Cache,
        ) -> i32;
        pub fn pariskv_cache_destroy(cache: *mut Cache);
        pub fn pariskv_cache_add(cache: *mut Cache, sequence: *mut i64) -> i32;
        pub fn pariskv_batch_create(
            cache: *const Cache,
            sequences: *const i64,
            count: i64,
            batch: *mut *mut Batch,
        ) -> i32;
        pub fn pariskv_batch_destroy(batch: *mut Batch);
        pub fn pariskv_cache_prefill(
            cache: *mut Cache,
            layer: i64,
            batch: *const Batch,
            lengths: *const i64,
            k: *const Tensor,
            v: *const Tensor,
            options: *const c_void,
            stream: *mut c_void,
        ) -> i32;
        pub fn pariskv_cache_decode(
            cache: *mut Cache,
            layer: i64,
            batch: *const Batch,
            q: *const Tensor,
            k: *const Tensor,
            v: *const Tensor,
            out: *const Tensor,
            options: *const c_void,
            stream: *mut c_void,
        ) -> i32;
        pub fn pariskv_cache_length(
            cache: *const Cache,
            sequence: i64,
            layer: i64,
            tokens: *mut i64,
        ) -> i32;
    }
}

const QUERY_HEADS: i64 = 8;
const KV_HEADS: i64 = 2;
const HEAD_DIM: i64 = 64;
const PROMPT: i64 = 20_000;
const STEPS: u64 = 32;
const FLOAT32: i32 = 0;

/// A status as Rust has errors: with the library's sentence.
fn check(status: i32) -> Result<(), String> {
    if status == 0 {
        return Ok(());
    }
    let sentence = unsafe { CStr::from_ptr(ffi::pariskv_last_error()) };
    Err(sentence.to_string_lossy().into_owned())
}

/// A context that the program's threads hand to the task: the library says that it may.
struct Context(*mut c_void);
unsafe impl Sync for Context {}

impl Context {
    fn do_share(&self, task: ffi::Task) {
        task(self.0)
    }
}

/// The program's threads; here they are new each time.
extern "C" fn run(_user: *mut c_void, times: i64, task: ffi::Task, context: *mut c_void) {
    let context = Context(context);
    std::thread::scope(|scope| {
        for _ in 1..times {
            scope.spawn(|| context.do_share(task));
        }
        context.do_share(task);
    });
}

/// Rows that look random: a prompt, or one token.
struct Rows {
    data: Vec<f32>,
    heads: i64,
}

impl Rows {
    fn new(tokens: i64, heads: i64, seed: u64) -> Rows {
        let mut state = seed;
        let count = (tokens * heads * HEAD_DIM) as usize;
        let mut next = || {
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            (state >> 40) as f32 / (1 << 22) as f32 - 2.0
        };
        Rows {
            data: (0..count).map(|_| next()).collect(),
            heads,
        }
    }

    fn tensor(&mut self) -> Result<ffi::Tensor, String> {
        let tokens = self.data.len() as i64 / (self.heads * HEAD_DIM);
        let shape = [tokens, self.heads, HEAD_DIM];
        let data = self.data.as_mut_ptr() as *mut c_void;
        unsafe {
            let mut tensor: ffi::Tensor = zeroed();
            let size = size_of::<ffi::Tensor>();
            check(ffi::pariskv_tensor_init(
                &mut tensor,
                size,
                data,
                FLOAT32,
                3,
                shape.as_ptr(),
            ))?;
            Ok(tensor)
        }
    }
}

/// A cache with one sequence. It ends with its value.
struct Chat {
    cache: *mut ffi::Cache,
    batch: *mut ffi::Batch,
    sequence: i64,
}

impl Chat {
    fn new(head_dim: i64, executor: Option<&ffi::Executor>) -> Result<Chat, String> {
        let mut chat = Chat {
            cache: null_mut(),
            batch: null_mut(),
            sequence: -1,
        };
        unsafe {
            let mut config: ffi::Config = zeroed();
            check(ffi::pariskv_config_init(
                &mut config,
                size_of::<ffi::Config>(),
            ))?;
            config.query_heads = QUERY_HEADS;
            config.kv_heads = KV_HEADS;
            config.head_dim = head_dim;
            config.dtype = FLOAT32;
            config.threads = 2;
            let mut resources: ffi::Resources = zeroed();
            resources.size = size_of::<ffi::Resources>();
            resources.executor = executor.map_or(null(), |executor| executor as *const _);
            check(ffi::pariskv_cache_create(
                &config,
                &resources,
                &mut chat.cache,
            ))?;
            check(ffi::pariskv_cache_add(chat.cache, &mut chat.sequence))?;
            check(ffi::pariskv_batch_create(
                chat.cache,
                &chat.sequence,
                1,
                &mut chat.batch,
            ))?;
        }
        Ok(chat)
    }

    fn prefill(&mut self, tokens: i64) -> Result<(), String> {
        let (mut k, mut v) = (
            Rows::new(tokens, KV_HEADS, 1),
            Rows::new(tokens, KV_HEADS, 2),
        );
        let (k, v) = (k.tensor()?, v.tensor()?);
        let (options, stream) = (null(), null_mut());
        check(unsafe {
            ffi::pariskv_cache_prefill(self.cache, 0, self.batch, &tokens, &k, &v, options, stream)
        })
    }

    fn decode(&mut self, step: u64) -> Result<Vec<f32>, String> {
        let mut q = Rows::new(1, QUERY_HEADS, 3 * step + 3);
        let mut k = Rows::new(1, KV_HEADS, 3 * step + 4);
        let mut v = Rows::new(1, KV_HEADS, 3 * step + 5);
        let mut out = Rows::new(1, QUERY_HEADS, 0);
        let (q, k, v, o) = (q.tensor()?, k.tensor()?, v.tensor()?, out.tensor()?);
        let (options, stream) = (null(), null_mut());
        check(unsafe {
            ffi::pariskv_cache_decode(self.cache, 0, self.batch, &q, &k, &v, &o, options, stream)
        })?;
        Ok(out.data)
    }

    fn length(&self) -> Result<i64, String> {
        let mut tokens = 0;
        check(unsafe { ffi::pariskv_cache_length(self.cache, self.sequence, 0, &mut tokens) })?;
        Ok(tokens)
    }
}

impl Drop for Chat {
    fn drop(&mut self) {
        unsafe {
            ffi::pariskv_batch_destroy(self.batch);
            ffi::pariskv_cache_destroy(self.cache);
        }
    }
}

fn main() -> Result<(), String> {
    let executor = ffi::Executor {
        size: size_of::<ffi::Executor>(),
        user: null_mut(),
        run,
    };
    let mut ours = Chat::new(HEAD_DIM, Some(&executor))?;
    let mut theirs = Chat::new(HEAD_DIM, None)?;
    ours.prefill(PROMPT)?;
    theirs.prefill(PROMPT)?;
    for step in 0..STEPS {
        if ours.decode(step)? != theirs.decode(step)? {
            return Err("the program's threads gave other bits than the library's own".into());
        }
    }
    let version = unsafe { CStr::from_ptr(ffi::pariskv_version()) }.to_string_lossy();
    println!("pariskv {version}, from Rust: {} tokens", ours.length()?);
    match Chat::new(65, None) {
        Ok(_) => Err("a head_dim of 65 was not refused".into()),
        Err(sentence) => Ok(println!("an error reads: {sentence}")),
    }
}
