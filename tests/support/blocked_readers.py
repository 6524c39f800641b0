"""Programs of a job that wait for ever, with a lock of the kernel on which a careless reader outside its sandbox waits.

A page fault on a file of the program's own FUSE daemon never ends, because the daemon does not answer. Standard library
only; all run as root of a sandbox and print a line when they wait.
"""

from __future__ import annotations

#: Size of a ring of packets.
RING_MIB = 64

#: Mounts a file whose first `failing` reads fail, and whose later ones are never answered. For the layout of the
#: messages see linux/fuse.h.
_DAEMON = """
import ctypes, os, struct, sys, threading, time

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.memchr.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

def attributes(node):
    mode, size = (0o40755, 0) if node == 1 else (0o100644, 65536)
    return struct.pack("=6Q10I", node, size, 8, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)

def answer_requests(fuse, failing):
    while True:
        request = os.read(fuse, 1 << 18)
        _, operation, unique, node = struct.unpack_from("=IIQQ", request)
        if operation == 26:  # INIT
            answer = struct.pack("=4I2H2I", 7, 31, 4096, 0, 12, 10, 4096, 1).ljust(64, bytes(1))
        elif operation == 1:  # LOOKUP
            answer = struct.pack("=4Q2I", 2, 0, 1, 1, 0, 0) + attributes(2)
        elif operation == 3:  # GETATTR
            answer = struct.pack("=Q2I", 1, 0, 0) + attributes(node)
        elif operation in (14, 27):  # OPEN, OPENDIR
            answer = bytes(16)
        elif operation == 15 and not failing:  # READ
            continue
        elif operation == 15:
            failing -= 1
            os.write(fuse, struct.pack("=IiQ", 16, -5, unique))
            continue
        elif operation in (2, 42):  # FORGET
            continue
        else:
            os.write(fuse, struct.pack("=IiQ", 16, -38, unique))
            continue
        os.write(fuse, struct.pack("=IiQ", 16 + len(answer), 0, unique) + answer)

def mount_silent_file():
    fuse = os.open("/dev/fuse", os.O_RDWR)
    os.makedirs("/tmp/silent", exist_ok=True)
    options = f"fd={fuse},rootmode=40000,user_id=0,group_id=0".encode()
    if libc.mount(b"silent", b"/tmp/silent", b"fuse", 0, options):
        sys.exit(f"cannot mount: {os.strerror(ctypes.get_errno())}")
    return fuse

def map_silent_file(failing, protection, flags):
    fuse = mount_silent_file()
    if not os.fork():
        answer_requests(fuse, failing)
    os.close(fuse)
    return libc.mmap(None, 4096, protection, flags, os.open("/tmp/silent/file", os.O_RDONLY), 0)

def in_thread(call, *arguments):
    threading.Thread(target=call, args=arguments, daemon=True).start()
    time.sleep(1)
"""
#: The lock of its memory. The third fault keeps it: only before does the kernel drop it during a read (filemap_fault).
#: A second thread waits for it as a writer, so that further readers wait as well.
MEMORY = f"""{_DAEMON}
address = map_silent_file(2, 1, 1)
if not os.fork():
    in_thread(libc.memchr, address, 1, 1)
    in_thread(libc.mmap, None, 4096, 1, 0x22, -1, 0)
    time.sleep(1000)
time.sleep(3)
print("blocked", flush=True)
time.sleep(1000)
"""
#: The lock of the folder that the agent reads: while the kernel lists it into memory that is not there, a second
#: process waits to create a file, and lookups wait behind that.
FOLDER = f"""{_DAEMON}
address = map_silent_file(0, 3, 2)
folder = os.open("/run/remuda", os.O_RDONLY)
in_thread(libc.syscall, {{"x86_64": 217, "aarch64": 61}}[os.uname().machine], folder, ctypes.c_void_p(address), 4096)
if not os.fork():
    open("/run/remuda/other", "w")
time.sleep(1)
print("blocked", flush=True)
time.sleep(1000)
"""
#: Ends such processes from outside, for tests whose reset has not done it: they outlive their namespaces.
ABORT = r"""
folder=$(mktemp -d)
mount -t fusectl fusectl "$folder"
for connection in "$folder"/*; do [ "$(stat -c %u "$connection")" -lt 524288 ] || echo 1 >"$connection/abort"; done
umount "$folder"
rmdir "$folder"
"""
#: The process itself: its own daemon has read the request for which it waits. Neither a signal nor the end of a
#: descriptor ends that, because the process holds the only one. It also keeps memory for which no cgroup pays.
ITSELF = f"""{_DAEMON}
import socket
ring = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
ring.setsockopt(263, 5, struct.pack("=4I", 1 << 20, {RING_MIB}, 2048, {RING_MIB} << 9))
in_thread(answer_requests, mount_silent_file(), 0)
in_thread(os.read, os.open("/tmp/silent/file", os.O_RDONLY), 1)
print("blocked", flush=True)
time.sleep(1000)
"""
