"""The upper layer of a sandbox, built for a small root file system.

Whiteouts are devices, and opaque folders have an attribute of the kernel's `trusted` namespace: both need root.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import pytest

from remuda.agent import sandbox_root
from remuda.agent.sandbox_root import JobUser, build_layer, host_resolver

FIRST_ID = 524_288
SOFTWARE = PurePosixPath("/opt/remuda")
PASSWD = """\
root:x:0:0:root:/root:/bin/bash
daemon:x:1:1::/usr/sbin:/usr/sbin/nologin
+::::::
ubuntu:x:1000:1000::/home/ubuntu:/bin/bash
"""
GROUP = """\
root:x:0:
sudo:x:27:ubuntu
docker:x:998:
ubuntu:x:1000:
"""
#: Content and mode by path.
FILES = {
    "etc/passwd": (PASSWD, 0o644),
    "etc/group": (GROUP, 0o644),
    "etc/shadow": ("root:$6$secret:1::::::\nubuntu:$6$secret:1::::::\n", 0o640),
    "etc/gshadow": ("docker:secret::\n", 0o640),
    "etc/shadow-": ("ubuntu:$6$old:1::::::\n", 0o600),
    "etc/sudoers": ("@includedir /etc/sudoers.d\n", 0o440),
    "etc/sudoers.d/90-cloud": ("ubuntu ALL=(ALL) ALL\n", 0o440),
    "etc/fstab": ("/dev/sdb /data\n", 0o644),
    "etc/os-release": ("ID=ubuntu\n", 0o644),
    "etc/hosts": ("10.0.0.1 intern\n", 0o644),
    "etc/hostname": ("ip-10-0-0-1\n", 0o644),
    "etc/machine-id": ("1234\n", 0o444),
    "etc/ssh/ssh_host_key": ("secret", 0o600),
    "etc/ssh/ssh_config": ("", 0o644),
    "etc/vpn/keys/readable": ("secret", 0o644),
    "etc/skel/.bashrc": ("PS1=x\n", 0o644),
    "etc/systemd/system/remuda-agent.service": ("[Service]\n", 0o644),
    "home/ubuntu/.ssh/authorized_keys": ("secret", 0o600),
    "root/.aws/credentials": ("secret", 0o600),
    "opt/remuda/bin/remuda": ("", 0o755),
    "opt/tools/tool": ("", 0o755),
    "srv/state/deep/secret": ("secret", 0o600),
    "srv/state/readable": ("", 0o644),
    "tmp/file": ("secret", 0o644),
    "usr/bin/env": ("", 0o755),
    "var/lib/cloud/user-data": ("secret", 0o644),
    "var/log/apt/history.log": ("secret", 0o644),
    "var/spool/cron/crontabs/root": ("secret", 0o600),
}


class FakeRoot:
    def __init__(self, folder: Path) -> None:
        self.root, self.layer = folder / "root", folder / "layer"
        for name, (text, mode) in FILES.items():
            self.add(name, text, mode)
        for name, mode in {"etc/sudoers.d": 0o750, "etc/vpn": 0o700, "root": 0o700, "var/log/apt": 0o2750}.items():
            (self.root / name).chmod(mode)
        (self.root / "etc/resolv.conf").symlink_to("../run/systemd/resolve/stub-resolv.conf")
        (self.root / "etc/systemd/system/dbus.service").symlink_to("/usr/lib/systemd/system/dbus-broker.service")
        (self.root / "etc/systemd/system/default.target").symlink_to("/usr/lib/systemd/system/multi-user.target")

    def add(self, name: str, text: str = "", mode: int = 0o644) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)
        return path

    def build(self, *hidden: str) -> JobUser:
        return build_layer(
            self.layer,
            root=self.root,
            first_id=FIRST_ID,
            software=SOFTWARE,
            hidden=hidden,
            resolver="nameserver 10.0.0.2\n",
        )

    def read(self, name: str) -> str:
        return (self.layer / name).read_text()

    def shows(self, name: str) -> bool:
        """Whether an overlay of the layer over the root would show this file or folder of the root."""
        seen, opaque = self.layer, False
        for part in PurePosixPath(name).parts:
            opaque = opaque or (seen.is_dir() and sandbox_root._OPAQUE in os.listxattr(seen))
            seen /= part
            if not os.path.lexists(seen):
                if opaque:
                    return False
                continue
            if not seen.is_dir() or seen.is_symlink():
                return False
        return True

    def status(self, name: str) -> tuple[int, int, int]:
        status = (self.layer / name).lstat()
        return stat.S_IMODE(status.st_mode), status.st_uid - FIRST_ID, status.st_gid - FIRST_ID


@pytest.fixture
def fake(tmp_path: Path) -> FakeRoot:
    probe = tmp_path / "probe"
    probe.mkdir()
    try:
        os.setxattr(probe, sandbox_root._OPAQUE, b"y")
        os.mknod(probe / "device", stat.S_IFCHR, os.makedev(0, 0))
    except OSError as problem:
        pytest.skip(f"whiteouts and attributes of overlays need root and a file system that has them: {problem}")
    return FakeRoot(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        *("etc/fstab", "etc/shadow-", "etc/ssh/ssh_host_key", "etc/vpn/keys/readable"),
        *("home/ubuntu", "root/.aws", "tmp/file", "var/lib/cloud/user-data"),
        *("var/log/apt/history.log", "var/spool/cron/crontabs/root", "opt/remuda/bin"),
        *("etc/systemd/system/remuda-agent.service",),
    ],
)
def test_secrets_and_state_of_the_host_are_hidden(fake: FakeRoot, name: str) -> None:
    assert os.path.lexists(fake.root / name)
    fake.build()
    assert not fake.shows(name)


@pytest.mark.parametrize(
    "name",
    [
        "usr/bin/env",
        "opt/tools/tool",
        "etc/os-release",
        "etc/ssh/ssh_config",
        "etc/sudoers",
        "etc/sudoers.d/90-cloud",
        "etc/skel/.bashrc",
    ],
)
def test_all_else_is_shown(fake: FakeRoot, name: str) -> None:
    fake.build()
    assert fake.shows(name)


def test_whiteout_is_a_device_with_the_number_0(fake: FakeRoot) -> None:
    fake.build()
    status = (fake.layer / "etc/fstab").lstat()
    assert (stat.S_ISCHR(status.st_mode), status.st_rdev) == (True, 0)


def test_folders_look_like_those_that_they_cover(fake: FakeRoot) -> None:
    (fake.root / "var/log").chmod(0o775)
    os.chown(fake.root / "var/log", 0, 4)
    os.chown(fake.root / "var/log/apt", 42, 4)
    (fake.root / "etc").chmod(0o751)
    fake.build()
    assert fake.status("var/log") == (0o775, 0, 4)
    assert fake.status("var/log/apt") == (0o2750, 42, 4)
    assert fake.status("etc") == (0o751, 0, 0)
    assert fake.status("etc/vpn") == (0o700, 0, 0)
    assert fake.status("tmp") == (0o1777, 0, 0)
    assert fake.status("root") == (0o700, 0, 0)


def test_empty_folders_have_their_usual_modes(fake: FakeRoot) -> None:
    """Only those for temporary files can be written by all users."""
    unusual = {
        **dict.fromkeys(("tmp", "var/tmp"), 0o1777),
        **dict.fromkeys(("root", "var/lib/private", "var/lib/remuda"), 0o700),
        "var/lib/containerd": 0o711,
        "var/lib/docker": 0o710,
    }
    for name in sandbox_root._EMPTY_FOLDERS:
        # The host's own modes do not matter.
        (fake.root / name).mkdir(mode=0o707, parents=True, exist_ok=True)
    fake.build()
    modes = {name: fake.status(name)[0] for name in sandbox_root._EMPTY_FOLDERS}
    assert modes == dict.fromkeys(modes, 0o755) | unusual


def test_modes_do_not_depend_on_the_umask(fake: FakeRoot) -> None:
    before = os.umask(0o077)
    try:
        fake.build()
    finally:
        os.umask(before)
    for name in (".", "opt/remuda/runner", "opt/hostedtoolcache", "etc/systemd/system/docker.service.d"):
        assert fake.status(name)[0] == 0o755, name


def test_all_owners_are_shifted(fake: FakeRoot) -> None:
    user = fake.build()
    for path in (fake.layer, *fake.layer.rglob("*")):
        status = path.lstat()
        owner = status.st_uid - FIRST_ID
        expected = user.uid if path.is_relative_to(fake.layer / "home/runner") else None
        if path == fake.layer / "opt/hostedtoolcache":
            expected = user.uid
        assert owner == (expected or 0), path
        assert 0 <= status.st_gid - FIRST_ID < 65_536


class TestJobUser:
    def test_has_the_ids_of_githubs_images_and_a_home(self, fake: FakeRoot) -> None:
        assert fake.build() == JobUser(uid=1001, gid=1001)
        assert fake.read("etc/passwd").splitlines()[-1] == "runner:x:1001:1001::/home/runner:/bin/bash"
        assert "runner:x:1001:" in fake.read("etc/group").splitlines()
        assert fake.read("home/runner/.bashrc") == "PS1=x\n"
        assert fake.status("home/runner/work") == (0o755, 1001, 1001)
        assert fake.status("opt/hostedtoolcache") == (0o755, 1001, 1001)

    def test_joins_the_groups_that_exist(self, fake: FakeRoot) -> None:
        fake.build()
        groups = {line.split(":")[0]: line.split(":")[3] for line in fake.read("etc/group").splitlines()}
        assert groups == {"root": "", "sudo": "ubuntu,runner", "docker": "runner", "ubuntu": "", "runner": ""}

    def test_takes_the_next_free_id(self, fake: FakeRoot) -> None:
        fake.add("etc/passwd", PASSWD + "other:x:1001:100::/:/bin/sh\n")
        fake.add("etc/group", GROUP + "others:x:1002:\n")
        assert fake.build() == JobUser(uid=1003, gid=1003)

    def test_user_of_the_image_is_kept(self, fake: FakeRoot) -> None:
        fake.add("etc/passwd", PASSWD + "runner:x:1500:1600::/srv/runner:/bin/sh\n")
        fake.add("etc/group", GROUP + "runner:x:1600:\n")
        assert fake.build() == JobUser(uid=1500, gid=1600)
        lines = [line for line in fake.read("etc/passwd").splitlines() if line.startswith("runner:")]
        assert lines == ["runner:x:1500:1600::/home/runner:/bin/bash"]
        assert fake.read("etc/group").count("runner:x:") == 1
        assert fake.status("home/runner") == (0o755, 1500, 1600)

    def test_root_without_accounts(self, fake: FakeRoot) -> None:
        for name in ("etc/passwd", "etc/group"):
            (fake.root / name).unlink()
        assert fake.build() == JobUser(uid=1001, gid=1001)

    def test_no_password_works(self, fake: FakeRoot) -> None:
        fake.build()
        shadow = [line.split(":") for line in fake.read("etc/shadow").splitlines()]
        assert [(name, password) for name, password, *_ in shadow] == [
            *(("root", "!*"), ("daemon", "!*"), ("ubuntu", "!*"), ("runner", "!*")),
        ]
        assert {len(line) for line in shadow} == {9}
        assert "secret" not in fake.read("etc/gshadow")
        assert fake.status("etc/shadow") == (0o640, 0, 0)

    def test_sudo_needs_no_password(self, fake: FakeRoot) -> None:
        fake.build()
        assert fake.read("etc/sudoers.d/remuda") == "runner ALL=(ALL:ALL) NOPASSWD: ALL\n"
        assert fake.status("etc/sudoers.d/remuda") == (0o440, 0, 0)
        assert fake.status("etc/sudoers.d") == (0o750, 0, 0)


class TestUnits:
    def test_only_own_units_and_aliases_are_left(self, fake: FakeRoot) -> None:
        fake.build()
        units = fake.layer / "etc/systemd/system"
        masked = {path.name for path in units.iterdir() if path.is_symlink() and path.readlink() == Path("/dev/null")}
        assert {path.name for path in units.iterdir()} - masked == {
            *("default.target", "remuda.target", "docker.service.d", "dbus.service"),
        }
        # Only root of the host may do what they do.
        assert {"systemd-modules-load.service", "sys-kernel-debug.mount"} <= masked
        assert (units / "default.target").readlink() == Path("remuda.target")
        assert (units / "dbus.service").readlink() == Path("/usr/lib/systemd/system/dbus-broker.service")

    def test_docker_knows_that_it_is_in_a_container(self, fake: FakeRoot) -> None:
        fake.build()
        assert "Environment=container=" in fake.read("etc/systemd/system/docker.service.d/remuda.conf")


class TestIdentity:
    def test_host_name_and_resolver_are_replaced(self, fake: FakeRoot) -> None:
        fake.build()
        assert fake.read("etc/hostname") == "runner\n"
        assert "intern" not in fake.read("etc/hosts")
        assert fake.read("etc/machine-id") == ""
        assert not (fake.layer / "etc/resolv.conf").is_symlink()
        assert fake.read("etc/resolv.conf") == "nameserver 10.0.0.2\n"

    def test_private_files_of_the_host_can_be_replaced(self, fake: FakeRoot) -> None:
        """On a host whose administrator made them unreadable."""
        for name in ("etc/hosts", "etc/passwd", "etc/machine-id"):
            (fake.root / name).chmod(0o600)
        (fake.root / "etc/systemd/system").chmod(0o700)
        fake.build()
        assert "localhost" in fake.read("etc/hosts")
        assert "runner" in fake.read("etc/passwd")
        assert (fake.layer / "etc/systemd/system/default.target").readlink() == Path("remuda.target")


class TestHidden:
    def test_folder_is_hidden_although_one_in_it_is_hidden_before(self, fake: FakeRoot) -> None:
        fake.build("/srv/state/deep", "/srv/state")
        assert not fake.shows("srv/state/deep/secret")
        assert not fake.shows("srv/state/readable")

    def test_folder_with_parts_of_the_layer_is_hidden(self, fake: FakeRoot) -> None:
        fake.build("/opt/")
        assert not fake.shows("opt/tools/tool")
        assert (fake.layer / "opt/remuda/runner").is_dir()

    def test_path_that_leads_through_a_link_is_hidden(self, fake: FakeRoot) -> None:
        (fake.root / "data").symlink_to("srv")
        fake.build("/data/state")
        assert not fake.shows("srv/state/readable")
        assert fake.shows("data")

    def test_missing_path_is_ignored(self, fake: FakeRoot) -> None:
        fake.build("/no/such/file")
        assert not (fake.layer / "no").exists()

    def test_target_of_a_linked_folder_is_hidden(self, fake: FakeRoot) -> None:
        """For example the homes of the administrators on another part of the disk."""
        (fake.root / "home").rename(fake.root / "srv/home")
        (fake.root / "home").symlink_to("srv/home")
        fake.build()
        assert not fake.shows("srv/home/ubuntu")
        assert fake.status("home/runner") == (0o755, 1001, 1001)

    def test_files_of_a_linked_folder_are_hidden(self, fake: FakeRoot) -> None:
        (fake.root / "var/log").rename(fake.root / "srv/log")
        (fake.root / "var/log").symlink_to("../srv/log")
        fake.build()
        assert not fake.shows("srv/log/apt/history.log")
        assert fake.status("var/log/apt") == (0o2750, 0, 0)
        assert list((fake.layer / "var/log/apt").iterdir()) == []

    def test_nothing_is_put_into_a_hidden_folder(self, fake: FakeRoot) -> None:
        """It would be listed there, although it cannot be opened."""
        fake.build("/home/ubuntu", "/srv", "/srv/state")
        assert [path.name for path in (fake.layer / "home").iterdir()] == ["runner"]
        assert (fake.layer / "srv").is_char_device()

    def test_swap_file_is_hidden(self, fake: FakeRoot, monkeypatch: pytest.MonkeyPatch) -> None:
        fake.add("swapfile", mode=0o600)
        table = "Filename Type Size Used Priority\n/swapfile file 1 0 -2\n/dev/sdb partition 1 0 -3\n"
        monkeypatch.setattr(Path, "read_text", _instead({"/proc/swaps": table}))
        fake.build()
        assert not fake.shows("swapfile")


def _instead(texts: dict[str, str]) -> Callable[..., str]:
    """Replace `Path.read_text` for these files. Others of /run and /etc do not exist."""
    read = Path.read_text

    def read_text(path: Path, *given: str, **options: str) -> str:
        if str(path) in texts:
            return texts[str(path)]
        if str(path).startswith(("/run/", "/etc/")):
            raise FileNotFoundError(path)
        return read(path, *given, **options)

    return read_text


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ({"/etc/resolv.conf": "nameserver 10.0.0.2\nsearch x\n"}, "nameserver 10.0.0.2\nsearch x\n"),
        (
            {
                "/run/systemd/resolve/resolv.conf": "nameserver 10.0.0.9\n",
                "/etc/resolv.conf": "nameserver 127.0.0.53\n",
            },
            "nameserver 10.0.0.9\n",
        ),
        ({"/etc/resolv.conf": "nameserver 127.0.0.53\nnameserver ::1\n"}, "nameserver 169.254.169.253\n"),
        ({"/etc/resolv.conf": "nameserver \n"}, "nameserver 169.254.169.253\n"),
        ({}, "nameserver 169.254.169.253\n"),
    ],
)
def test_name_servers_can_be_reached_from_a_sandbox(
    monkeypatch: pytest.MonkeyPatch, texts: dict[str, str], expected: str
) -> None:
    monkeypatch.setattr(Path, "read_text", _instead(texts))
    assert host_resolver() == expected
