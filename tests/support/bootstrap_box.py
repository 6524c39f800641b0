"""Runs of the real user data on folders in place of a machine's root, with system commands replaced."""

from __future__ import annotations

import hashlib
import io
import shutil
import subprocess
import tarfile
from pathlib import Path

from remuda.adapters.aws.ec2.options import Ec2LaunchOptions
from remuda.adapters.aws.user_data import MachineLayout, build_user_data
from tests.support.fake_imds import FakeImds

NEEDED = {"ami": "ami-12345678", "subnet-ids": "subnet-12345678", "iam-instance-profile": "agent"}
LIMIT_S = 60
#: A user that exists everywhere.
JOB_USER = "nobody"
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


class BootstrapBox:
    """The folders of a machine, and replaced commands that record their calls."""

    def __init__(self, folder: Path, imds: FakeImds) -> None:
        self.layout = MachineLayout(
            opt=str(folder / "opt"),
            state=str(folder / "state"),
            units=str(folder / "units"),
            etc=str(folder / "etc"),
            job_user=JOB_USER,
        )
        self.opt, self.state, self.units, self.etc = (folder / name for name in ("opt", "state", "units", "etc"))
        self.etc.mkdir()
        self.mirror, self.bin = folder / "mirror", folder / "bin"
        self.mirror.mkdir()
        self.bin.mkdir()
        self._calls = folder / "calls"
        for name in ("systemd-run", "systemctl", "shutdown", "useradd", "iptables", "ip6tables", "dnf"):
            self.command(name, RECORD_CALL)
        for name in ("iptables-restore", "ip6tables-restore"):
            self.command(name, RECORD_CALL + 'cat >>"$CALLS"\n')
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
