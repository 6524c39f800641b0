"""Virtual machines in qemu that run the real user data and the real agent on a real kernel."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.support.aws.servers import die_with_parent
from tests.support.virtual_machine.image import MIRROR, SUITE, Image, debian_mirror, is_built

QEMU = "qemu-system-x86_64"
FORWARD = Path(__file__).with_name("forward.py")
#: The address at which machines reach servers on this computer's loopback.
HOST = "169.254.0.2"
METADATA = "169.254.169.254"
#: Environment variable that selects an accelerator, for example `tcg`.
ACCELERATOR = "REMUDA_TEST_ACCELERATOR"
KVM, TCG = "kvm", "tcg"
CPU = {KVM: "host", TCG: "max"}
#: Seconds in which a kernel must start and stop under kvm. Nested virtualization may let guests hang.
PROBE_S = 15.0
MEMORY = "2048M"
#: Seconds to wait. Generous: emulation is 10 to 20 times slower than a machine, and the computer may be busy.
LIMIT_S = 600.0
COMMAND_S = 120.0
POLL_S = 0.1
#: Prefix of the journal's lines on the console.
_JOURNAL = re.compile(r"^\[ *\d+\.\d+\] (?:[\w.@:\\()-]+\[\d+\]: )?", re.MULTILINE)


class MachineError(RuntimeError):
    """A virtual machine ended or does not respond."""


@cache
def unsupported_reason() -> str:
    """The reason why this computer cannot run virtual machines; empty if it can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "virtual machines need Linux on x86_64"
    if shutil.which(QEMU) is None:
        return "virtual machines need qemu (Debian: apt-get install qemu-system-x86)"
    if is_built():
        return ""
    if os.geteuid() != 0:
        return "the image of the virtual machines is built by root"
    if shutil.which("debootstrap", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin") is None:
        return "the image of the virtual machines needs debootstrap (Debian: apt-get install debootstrap)"
    if not debian_mirror():
        return f"apt has no source for Debian {SUITE}: set {MIRROR} to the URL of a mirror"
    return ""


@cache
def accelerator(image: Image) -> str:
    """`kvm` if a kernel starts and stops under it, otherwise `tcg`: emulation."""
    if given := os.environ.get(ACCELERATOR):
        return given
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return TCG
    # Without an init the kernel panics and reboots at once.
    arguments = "console=ttyS0 panic=-1 rdinit=/missing root=/missing"
    command = [
        *(QEMU, "-nodefaults", "-display", "none", "-serial", "stdio", "-no-reboot", "-m", "256M"),
        *("-accel", KVM, "-cpu", CPU[KVM], "-kernel", str(image.kernel), "-append", arguments),
    ]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=PROBE_S, check=False, text=True
        )
    except subprocess.TimeoutExpired:
        return TCG
    return KVM if done.returncode == 0 and "Kernel panic" in done.stdout else TCG


class VirtualMachine:
    """A machine that runs until it powers itself off or is stopped. A reboot does not end it."""

    def __init__(self, folder: Path, *, image: Image, software: Path, metadata_url: str) -> None:
        """`software` is a disk of `write_software_disk`, `metadata_url` the metadata service on loopback."""
        folder.mkdir(parents=True, exist_ok=True)
        self.accelerator = accelerator(image)
        self._console = folder / "console.log"
        self._errors = folder / "qemu.log"
        self._console.touch()
        address = urlsplit(metadata_url)
        forward = f"{sys.executable} -IS {FORWARD} {address.hostname} {address.port}".replace(",", ",,")
        network = f"user,id=net,net=169.254.0.0/16,host={HOST},dhcpstart=169.254.0.15,ipv6=off"
        self._channel = _CommandChannel()
        command = [
            *(QEMU, "-nodefaults", "-display", "none", "-machine", "q35", "-smp", "2", "-m", MEMORY),
            *("-accel", "tcg,thread=multi" if self.accelerator == TCG else self.accelerator),
            *("-cpu", CPU.get(self.accelerator, "max")),
            *("-kernel", str(image.kernel), "-initrd", str(image.initrd)),
            # The clock of the CPU is not usable in every guest, and checking it takes time.
            *("-append", "root=/dev/vda rw console=ttyS0 quiet systemd.show_status=0 tsc=reliable"),
            *("-drive", f"file={_escaped(image.disk)},format=raw,if=virtio,snapshot=on"),
            *("-drive", f"file={_escaped(software)},format=raw,if=virtio,readonly=on"),
            *("-netdev", f"{network},guestfwd=tcp:{METADATA}:80-cmd:{forward}"),
            *("-device", "virtio-net-pci,netdev=net,romfile=", "-device", "virtio-rng-pci"),
            *("-chardev", f"file,id=console,path={_escaped(self._console)},append=on", "-serial", "chardev:console"),
            *("-chardev", f"socket,id=commands,fd={self._channel.remote.fileno()}"),
            *("-device", "virtio-serial-pci"),
            *("-device", "virtserialport,chardev=commands,name=remuda.commands"),
        ]
        with self._errors.open("ab") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                start_new_session=True,
                pass_fds=[self._channel.remote.fileno()],
                preexec_fn=die_with_parent,  # noqa: PLW1509 - calls prctl only
                # Qemu keeps the changes to the disk in a temporary file.
                env={**os.environ, "TMPDIR": str(folder)},
            )
        self._channel.start()

    @property
    def is_on(self) -> bool:
        return self._process.poll() is None

    @property
    def console(self) -> str:
        """The output of the kernel, of the user data and of all services, without the prefixes of the journal."""
        text = self._console.read_text(errors="replace").replace("\r", "")
        return _JOURNAL.sub("", text)

    @property
    def boots(self) -> list[str]:
        """The boot ids of the machine, one per boot, in order."""
        return list(self._channel.boots)

    def run(self, *command: str, stdin: str = "", timeout_s: float = COMMAND_S) -> subprocess.CompletedProcess[str]:
        """Run a command as root inside the machine. Waits until the machine has booted."""
        return self._channel.run(command, stdin=stdin, timeout_s=timeout_s, is_on=lambda: self.is_on)

    def shell(self, script: str, *, timeout_s: float = COMMAND_S) -> subprocess.CompletedProcess[str]:
        """Run a script of bash as root inside the machine."""
        return self.run("bash", "-s", stdin=script, timeout_s=timeout_s)

    def wait_for(self, text: str, *, timeout_s: float = LIMIT_S) -> None:
        """Wait until the console shows this text."""
        self._wait(lambda: text in self.console, f"{text!r} on the console", timeout_s, also_off=True)

    def wait_for_boot(self, number: int = 1, *, timeout_s: float = LIMIT_S) -> None:
        """Wait until the machine has booted for this number of times."""
        self._wait(lambda: len(self._channel.boots) >= number, f"boot {number}", timeout_s)

    def wait_for_power_off(self, *, timeout_s: float = LIMIT_S) -> None:
        self._wait(lambda: not self.is_on, "power-off", timeout_s, also_off=True)

    def _wait(self, condition: Any, what: str, timeout_s: float, *, also_off: bool = False) -> None:
        deadline = time.monotonic() + timeout_s
        pause = threading.Event()
        while not condition():
            if time.monotonic() >= deadline or (not self.is_on and not (also_off and condition())):
                state = "is on" if self.is_on else "is off"
                raise MachineError(f"no {what}; the machine {state}\n{self.console}{self._errors.read_text()}")
            pause.wait(POLL_S)

    def stop(self) -> None:
        """Cut the power."""
        if self.is_on:
            self._process.kill()
        self._process.wait(LIMIT_S)
        self._channel.close()


class _CommandChannel:
    """Sends commands to `guest/command_server.py` over a virtio port, which is one end of a pair of sockets."""

    def __init__(self) -> None:
        self._local, self.remote = socket.socketpair()
        self._answers: dict[int, dict[str, Any]] = {}
        self._changed = threading.Condition()
        self._next_id = 0
        self.boots: list[str] = []
        self._thread = threading.Thread(target=self._receive, daemon=True)

    def start(self) -> None:
        """Called when qemu has the other end."""
        self.remote.close()
        self._thread.start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._local.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._local.close()

    def run(
        self, command: tuple[str, ...], *, stdin: str, timeout_s: float, is_on: Any
    ) -> subprocess.CompletedProcess[str]:
        deadline = time.monotonic() + timeout_s + LIMIT_S
        with self._changed:
            self._wait(lambda: bool(self.boots), deadline, command, is_on)
            self._next_id += 1
            number, boots = self._next_id, len(self.boots)
            request = {"id": number, "command": command, "stdin": stdin, "timeout_s": timeout_s}
            self._local.sendall(f"\n{json.dumps(request)}\n".encode())
            self._wait(lambda: number in self._answers or len(self.boots) > boots, deadline, command, is_on)
            if number not in self._answers:
                raise MachineError(f"the machine rebooted during {command}")
            answer = self._answers.pop(number)
        return subprocess.CompletedProcess(command, answer["code"], answer["stdout"], answer["stderr"])

    def _wait(self, condition: Any, deadline: float, command: tuple[str, ...], is_on: Any) -> None:
        while not condition():
            if time.monotonic() >= deadline or not is_on():
                raise MachineError(f"no answer to {command}; the machine is {'on' if is_on() else 'off'}")
            self._changed.wait(POLL_S)

    def _receive(self) -> None:
        received = b""
        with contextlib.suppress(OSError):
            while chunk := self._local.recv(65_536):
                received += chunk
                *lines, received = received.split(b"\n")
                for line in lines:
                    self._handle(line)

    def _handle(self, line: bytes) -> None:
        try:
            document = json.loads(line)
        except ValueError:
            return  # empty, or cut off by a reboot
        with self._changed:
            if boot_id := document.get("boot_id"):
                if boot_id not in self.boots:
                    self.boots.append(boot_id)
            else:
                self._answers[document["id"]] = document
            self._changed.notify_all()


def _escaped(path: Path) -> str:
    return str(path).replace(",", ",,")
