"""A fake of the instance metadata service, version 2, and runs of the real user data with it.

User data runs on folders in place of a machine's root, with system commands replaced.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import shutil
import socket
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from remuda.adapters.aws.ec2.options import Ec2LaunchOptions
from remuda.adapters.aws.user_data import MachineLayout, build_user_data

INSTANCE_ID = "i-0123456789abcdef0"
CREDENTIALS = "iam/security-credentials/"


class FakeImds:
    def __init__(self) -> None:
        #: By path below /latest/meta-data/. All other paths return 404.
        self.values: dict[str, str] = {
            "instance-id": INSTANCE_ID,
            "instance-life-cycle": "on-demand",
            "placement/region": "eu-central-1",
            "services/domain": "amazonaws.com",
            "tags/instance/remuda:pool": "pool",
            "tags/instance/remuda:margin-s": "60",
            "tags/instance/remuda:first-life-s": "400",
        }
        self.tokens: list[str] = []
        #: Number of the newest tokens that are accepted.
        self.valid = 1
        #: If not 0: the status of all responses.
        self.status = 0
        self.requests: list[str] = []
        self.url = ""
        #: Path of its network namespace, if it has its own.
        self.network = ""

    def answer(self, method: str, path: str, token: str, life: str, *, is_forwarded: bool = False) -> tuple[int, str]:
        self.requests.append(f"{method} {path}")
        if self.status:
            return self.status, ""
        if (method, path) == ("PUT", "/latest/api/token"):
            if is_forwarded:
                # A proxy must not get a token (AWS Security Blog, "Add defense in depth against open firewalls, reverse
                # proxies, and SSRF vulnerabilities"); 403: "The request is not allowed" (EC2 User Guide).
                return 403, ""
            if not (life.isdecimal() and 1 <= int(life) <= 21_600):
                return 400, ""
            self.tokens.append(f"token-{len(self.tokens)}")
            return 200, self.tokens[-1]
        if method != "GET" or token not in self.tokens[len(self.tokens) - self.valid :]:
            return 401, ""
        value = self.values.get(path.removeprefix("/latest/meta-data/"))
        return (404, "") if value is None else (200, value)

    def describe(self, instance_id: str, *, tags: Mapping[str, str], zone: str, life_cycle: str = "on-demand") -> None:
        """Become the service of this machine."""
        self.values = {
            "instance-id": instance_id,
            "instance-life-cycle": life_cycle,
            "placement/availability-zone": zone,
            "placement/region": zone[:-1],
            "services/domain": "amazonaws.com",
            **{f"tags/instance/{key}": value for key, value in tags.items()},
        }

    def set_credentials(self, role: str, credentials: Mapping[str, str]) -> None:
        """Set AccessKeyId, SecretAccessKey, Token and Expiration."""
        self.values[CREDENTIALS] = role
        self.values[CREDENTIALS + role] = json.dumps({"Code": "Success", "Type": "AWS-HMAC", **credentials})

    def set_spot_notice(self, action: str, at: str) -> None:
        self.values["spot/instance-action"] = json.dumps({"action": action, "time": at})


@contextmanager
def serve(handler: type[BaseHTTPRequestHandler], listening: socket.socket | None = None) -> Iterator[str]:
    """Run an HTTP server on a listening socket, or on a free port of loopback. Return its URL on loopback."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler, bind_and_activate=False) as server:
        server.socket.close()
        server.socket = listening or socket.create_server(("127.0.0.1", 0), backlog=100)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def fake_imds(sockets: Sequence[socket.socket] = ()) -> Iterator[FakeImds]:
    """Run the service on these listening sockets, or on loopback."""
    imds = FakeImds()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _handle(self) -> None:
            token = self.headers.get("X-aws-ec2-metadata-token", "")
            life = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
            is_forwarded = "X-Forwarded-For" in self.headers
            status, text = imds.answer(self.command, self.path, token, life, is_forwarded=is_forwarded)
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_PUT = _handle  # noqa: N815 - names that the server calls

        def log_message(self, *_line: object) -> None:
            """Write no access log."""

    with ExitStack() as stack:
        for each in sockets or (None,):
            imds.url = stack.enter_context(serve(Handler, each))
        yield imds


# User data ------------------------------------------------------------------------------------------------------------

NEEDED = {"ami": "ami-12345678", "subnet-ids": "subnet-12345678", "iam-instance-profile": "agent"}
LIMIT_S = 60
#: Commands that a machine needs for sandboxes.
SANDBOX_COMMANDS = ("systemd-nspawn", "iptables", "ip", "sudo", "dockerd")
#: Records its arguments.
RECORD_CALL = '#!/bin/sh\necho "$(basename "$0") $*" >>"$CALLS"\n'
#: Serves https:// from a folder; passes all other requests to the real curl.
CURL = """#!/bin/bash
for last; do :; done
case $last in
  https://*)
    echo "fetch $last" >>"$CALLS"
    while [[ $1 != -o ]]; do shift; done
    exec cp "$MIRROR/${last##*/}" "$2" ;;
esac
exec "$REAL_CURL" "$@"
"""


def user_data(launch: dict[str, str] | None = None, **more: object) -> str:
    options = Ec2LaunchOptions.parse({**NEEDED, **(launch or {})})
    return build_user_data(options, pool="pool", environment={}, **more)  # type: ignore[arg-type]


def decode_user_data(value: str) -> str:
    """The text of user data as EC2 returns it. cloud-init decompresses it, too."""
    data = base64.b64decode(value)
    return (gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data).decode()


class AptLocks:
    """An apt-get and a systemctl that respect locks as those of Ubuntu 24.04 do, and automatic updates that hold them.

    `apt-get update` fails at once if another process has the lock of the package lists; `apt-get install` waits for the
    frontend lock of dpkg as long as DPkg::Lock::Timeout says (tried with apt 2.6.1). Stopping apt-daily.service ends
    its `apt-get update`. Stopping apt-daily-upgrade.service, which has KillMode=process, lets dpkg end its package.
    """

    LISTS, FRONTEND = "lists.lock", "lock-frontend"
    #: The lock that a unit holds while it runs.
    HOLDERS: Mapping[str, str] = {"apt-daily.service": LISTS, "apt-daily-upgrade.service": FRONTEND}
    #: Seconds that dpkg needs for its package.
    PACKAGE_S = 0.5

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._holders: dict[str, subprocess.Popen[str]] = {}
        folder.mkdir()

    def commands(self) -> Mapping[str, str]:
        return {
            "apt-get": f"#!{sys.executable}\nfolder = {str(self._folder)!r}\n{_APT_GET}",
            "systemctl": f"{RECORD_CALL}"
            f'for word; do :; [ -e "{self._folder}/$word.pid" ] || continue\n'
            f'  case " $* " in *" stop "*) kill "$(cat "{self._folder}/$word.pid")" ;; esac\ndone\n',
        }

    def start(self, unit: str) -> None:
        """Run the unit, which has its lock when this returns."""
        command = [sys.executable, "-ISc", _HOLDER, str(self._folder / self.HOLDERS[unit])]
        command.append(str(self.PACKAGE_S if self.HOLDERS[unit] == self.FRONTEND else 0))
        holder = self._holders[unit] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        (self._folder / f"{unit}.pid").write_text(str(holder.pid))
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"

    def stop(self) -> None:
        for holder in self._holders.values():
            with holder:
                holder.kill()


_HOLDER = """
import fcntl, signal, sys, time
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
file = open(sys.argv[1], "a")
fcntl.lockf(file, fcntl.LOCK_EX)
print("locked", flush=True)
signal.sigwait({signal.SIGTERM})
time.sleep(float(sys.argv[2]))
"""
_APT_GET = """
import fcntl, os, re, sys, time

def lock(name, wait_s):
    file = open(folder + "/" + name, "a")
    end = time.monotonic() + wait_s
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() >= end:
                print("E: Could not get lock " + name, file=sys.stderr)
                sys.exit(100)
            time.sleep(0.02)

with open(os.environ["CALLS"], "a") as calls:
    calls.write(" ".join(["apt-get", *sys.argv[1:]]) + "\\n")
settings = " ".join(sys.argv)
if os.environ.get("APT_CONFIG"):
    settings += open(os.environ["APT_CONFIG"]).read()
timeout = re.search('DPkg::Lock::Timeout(?:=| ")([0-9]+)', settings)
if "update" in sys.argv:
    lock("lists.lock", 0)
elif "install" in sys.argv:
    lock("lock-frontend", int(timeout[1]) if timeout else 0)
    for name in os.environ.get("INSTALLS", "").split():
        open(name, "w").write("#!/bin/sh\\n")
        os.chmod(name, 0o755)
"""


class BootstrapBox:
    """The folders of a machine, and replaced commands that record their calls."""

    def __init__(self, folder: Path, imds: FakeImds) -> None:
        self.layout = MachineLayout(
            opt=str(folder / "opt"),
            state=str(folder / "state"),
            units=str(folder / "units"),
        )
        self.opt, self.state, self.units = (folder / name for name in ("opt", "state", "units"))
        self.mirror, self.bin = folder / "mirror", folder / "bin"
        self.mirror.mkdir()
        self.bin.mkdir()
        self.imds = imds
        self._calls = folder / "calls"
        for name in (
            *("systemd-run", "systemctl", "shutdown", "networkctl", "ip6tables", "apt-get", "sleep"),
            *SANDBOX_COMMANDS,
        ):
            self.command(name, RECORD_CALL)
        self.command("stat", "#!/bin/sh\necho cgroup2fs\n")
        self.command("ldconfig", RECORD_CALL + "echo libicuuc.so.72\n")
        self.command("curl", CURL)
        self.environment = {
            "PATH": f"{self.bin}:/usr/local/bin:/usr/bin:/bin",
            "CALLS": str(self._calls),
            "MIRROR": str(self.mirror),
            "REAL_CURL": shutil.which("curl") or "curl",
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": imds.url,
        }

    def command(self, name: str, text: str) -> None:
        executable(self.bin / name, text)

    def no_pauses(self) -> None:
        """Let Python programs of the bootstrap repeat failed requests at once."""
        program = "import sys, time; time.sleep = lambda _: 0; del sys.argv[:2]; exec(sys.stdin.read())"
        self.command("python3", f'#!/bin/sh\nexec {sys.executable} -ISc "{program}" "$@"\n')

    def without(self, *names: str) -> None:
        """Remove commands, also those of this computer."""
        system = self.bin.with_name("system-commands")
        system.mkdir()
        for path in (*Path("/bin").iterdir(), *Path("/usr/bin").iterdir()):
            if path.name not in names and not (system / path.name).is_symlink():
                (system / path.name).symlink_to(path)
        for name in names:
            (self.bin / name).unlink(missing_ok=True)
        self.environment["PATH"] = f"{self.bin}:{system}"

    def offer(self, name: str, files: dict[str, str]) -> str:
        """Put an archive on the mirror and return its SHA-256."""
        with tarfile.open(self.mirror / name, "w:gz") as archive:
            for path, text in files.items():
                entry = tarfile.TarInfo(path)
                entry.size, entry.mode = len(text), 0o755
                archive.addfile(entry, io.BytesIO(text.encode()))
        return hashlib.sha256((self.mirror / name).read_bytes()).hexdigest()

    def preinstall(self) -> None:
        """Install agent and runner, as a complete image has them."""
        executable(self.opt / "bin" / "remuda", "#!/bin/sh\n")
        executable(self.opt / "runner" / "bin" / "Runner.Listener", "#!/bin/sh\n")

    def boot(self, launch: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        text = user_data(launch, layout=self.layout)
        return subprocess.run(
            ["bash"],
            input=text,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )

    @property
    def calls(self) -> list[str]:
        return self._calls.read_text().splitlines()


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
