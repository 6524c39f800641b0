"""The kernel's keys of a user: they live in memory, without a process and without a file. Needs root."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

from remuda.agent import processes
from remuda.agent.job_user import JobUser
from remuda.domain.errors import Unavailable

USERS = Path("/proc/key-users")
LIMIT_S = 15.0
#: The number of `keyctl`, which no C library wraps.
_SYSCALLS = {"x86_64": 250, "aarch64": 219}
#: As the user, for whom alone the keyrings open: empties them and reads them back. The user's, the one of its
#: sessions, and the one that outlives them: all else hangs on these or on a process. A session of its own, so that
#: none of root's keys is in reach. Not every kernel has keyrings that persist.
_EMPTY = """
number = int(sys.argv[3])
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def keyctl(*arguments, without=()):
    done = libc.syscall(ctypes.c_long(number), *(ctypes.c_long(each) for each in arguments))
    code = ctypes.get_errno()
    if done < 0 and code not in without:
        sys.exit(os.strerror(code))
    return None if done < 0 else done
if keyctl(1, 0, without=(errno.ENOSYS,)) is None:
    print(0)
    sys.exit()
def listed(ring):
    size = keyctl(11, ring, 0, 0)
    room = (ctypes.c_int32 * (size // 4 + 1))()
    keyctl(11, ring, ctypes.addressof(room), size)
    return [each for each in room[: size // 4] if each != users]
users = keyctl(0, -4, 0)
found = 0
for ring in (users, keyctl(0, -5, 0), keyctl(22, uid, -2, without=(errno.EOPNOTSUPP, errno.ENOSYS))):
    if ring is not None:
        found += len(listed(ring))
        keyctl(7, ring)
        if listed(ring):
            sys.exit("they came back")
# As the kernel makes it.
keyctl(8, users, -5)
print(found)
"""


def empty(user: JobUser) -> int:
    """Remove all keys of the user; how many there were. `Unavailable` where that cannot be done, or not be seen."""
    if not _has_keys(user.uid):
        return 0
    number = _SYSCALLS.get(platform.machine())
    if number is None:
        raise Unavailable(f"the kernel's keys of {user.name} cannot be removed on {platform.machine()}")
    try:
        done = processes.run_as(user, _EMPTY, str(number), timeout_s=LIMIT_S, modules=("ctypes", "errno"))
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise Unavailable(f"the kernel's keys of {user.name} cannot be removed: {problem}") from problem
    if done.returncode or not done.stdout.strip().isdecimal():
        raise Unavailable(f"the kernel's keys of {user.name} cannot be removed: {done.stderr.strip()[-200:]}")
    return int(done.stdout)


def _has_keys(uid: int) -> bool:
    """Whether the kernel knows it as the owner of a key at all. Without the list there are no keys."""
    try:
        lines = USERS.read_text(encoding="ascii").splitlines()
    except FileNotFoundError:
        return False
    return any(line.partition(":")[0].strip() == str(uid) for line in lines)
