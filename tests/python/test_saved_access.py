"""Who may read a saved file: what replaces a file has its mode, owner and access list."""

import os
import struct

import pytest
from support import make_config
from test_saved import child, lived

pytestmark = pytest.mark.cpu("files in host memory")


def test_a_replaced_file_keeps_its_mode_and_a_new_one_follows_the_umask(tmp_path):
    program = """
        mode = lambda path: oct(os.stat(path).st_mode & 0o7777)
        for umask in (0o000, 0o022, 0o077):
            os.umask(umask)
            cache.save(s, f"new-{umask}")
            assert mode(f"new-{umask}") == oct(0o666 & ~umask)
            for old in (0o600, 0o640, 0o444, 0o604, 0o666):
                os.chmod(f"new-{umask}", old)
                cache.save(s, f"new-{umask}")
                assert mode(f"new-{umask}") == oct(old), oct(old)
        os.umask(0)
        os.chmod("new-0", 0o600)
        saving = threading.Thread(target=cache.save, args=(s, "new-0"))
        saving.start()
        seen = set()
        while saving.is_alive():
            for name in os.listdir():
                try:
                    seen |= {mode(name)} if name.startswith(".pariskv-") else set()
                except FileNotFoundError:  # it has its place by now
                    pass
        assert seen == {"0o600"}, seen
    """
    done = child(program, tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of other owners")
def test_a_replaced_file_keeps_its_owner_or_is_less_readable(tmp_path):
    program = """
        def saved_over(mode, owner, group):
            with open("x", "w"):
                os.chown("x", owner, group)
                os.chmod("x", mode)
            os.setegid(groups[0]), os.seteuid(user)
            cache.save(s, "x")
            os.seteuid(0), os.setegid(0)
            found = os.stat("x")
            os.unlink("x")
            return oct(found.st_mode & 0o7777), found.st_uid, found.st_gid

        os.umask(0)
        os.chmod(".", 0o777)
        user, groups = 0, [0]
        assert saved_over(0o640, 1234, 4321) == ("0o640", 1234, 4321)
        user, groups = 4000, [4001, 4002]  # one that may not give files away
        os.setgroups(groups)
        assert saved_over(0o640, 4000, 4002) == ("0o640", 4000, 4002)
        assert saved_over(0o640, 1234, 4002) == ("0o640", 4000, 4002)
        assert saved_over(0o640, 1234, 4321) == ("0o600", 4000, 4001)
        assert saved_over(0o664, 1234, 4321) == ("0o644", 4000, 4001)
        assert saved_over(0o606, 1234, 4321) == ("0o600", 4000, 4001)
    """
    done = child(program, tmp_path)
    assert done.returncode == 0, done.stderr


def _acl(*named: tuple[int, int]) -> bytes:
    """The kernel's form of an access list: owner rw, group none, and these users' rights."""
    entries = [(0x01, 6, -1), *((0x02, rights, user) for user, rights in named)]
    entries += [(0x04, 0, -1), (0x10, 6, -1), (0x20, 0, -1)]
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)


def test_a_replaced_file_keeps_its_access_list(tmp_path, rng):
    cache, s = lived(make_config(), rng)
    listed, other = "system.posix_acl_access", tmp_path / "plain"
    cache.save(s, tmp_path / "x")
    cache.save(s, other)
    try:
        os.setxattr(tmp_path / "x", listed, _acl((1234, 4)))
        os.setxattr(tmp_path, "system.posix_acl_default", _acl((4321, 6)))
    except OSError:
        pytest.skip("a file system without access lists")
    before = os.getxattr(tmp_path / "x", listed), other.stat().st_mode
    cache.save(s, tmp_path / "x")
    cache.save(s, other)
    assert (os.getxattr(tmp_path / "x", listed), other.stat().st_mode) == before
    with pytest.raises(OSError, match="No data"):
        os.getxattr(other, listed)  # nothing of the folder's default


def test_a_link_is_followed_also_to_a_file_that_is_not_there(tmp_path, rng):
    cache, s = lived(make_config(), rng)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "a/first").symlink_to("../second")
    (tmp_path / "second").symlink_to(tmp_path / "b/file")
    for _ in range(2):  # a file that is made, and one that is replaced
        cache.save(s, tmp_path / "a/first")
        assert (tmp_path / "a/first").is_symlink() and (tmp_path / "second").is_symlink()
        assert os.listdir(tmp_path / "b") == ["file"]
        assert cache.length(cache.load(tmp_path / "b/file")) == cache.length(s)
    (tmp_path / "a/first").unlink()
    (tmp_path / "a/first").symlink_to("nowhere/file")
    with pytest.raises(
        FileNotFoundError, match=r"cannot write to the folder .*/a/nowhere/: No such"
    ):
        cache.save(s, tmp_path / "a/first")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match=r"cannot look at .*/loop: Too many levels"):
        cache.save(s, tmp_path / "loop")
    (tmp_path / "pipe").symlink_to("/dev/null")
    with pytest.raises(OSError, match=r"expected a file, got a device or a pipe, .*/pipe"):
        cache.save(s, tmp_path / "pipe")
    (tmp_path / "folder").symlink_to("b")
    with pytest.raises(IsADirectoryError):
        cache.save(s, tmp_path / "folder")
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "folder", "loop", "pipe", "second"]
