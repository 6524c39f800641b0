"""Self-update: makes another version from this one, and a script that switches to it when the listener has ended.

Runner.Listener/SelfUpdaterV2.cs and src/Misc/layoutbin/update.sh.template. The real runner also replaces `externals`.
"""

import os
import pathlib
import shutil
import subprocess

from .home import VERSION_FILE, RunnerHome, say

FINISHED = "update.finished"
_SCRIPT = """\
# The real script polls every 2 seconds.
while [ -e /proc/{pid} ]; do sleep 0.1; done
sleep 1
cd "{root}" || exit 1
if [ -L bin ]; then rm bin; else mv -f bin bin.{old}; fi || exit 1
ln -s "{root}/bin.{new}" bin || exit 1
touch {finished}
"""


def begin_update(home: RunnerHome, work: pathlib.Path, version: str) -> None:
    """Install the version and start the script. The listener must exit then."""
    say("Runner update in progress, do not shutdown runner.")
    say(f"Downloading {version} runner")
    programs = home.root / f"bin.{version}"
    shutil.copytree(home.root / "bin", programs, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    (programs / VERSION_FILE).unlink(missing_ok=True)
    (programs / VERSION_FILE).write_text(f"{version}\n")
    say("Waiting for current job finish running.")
    say("Generate and execute update script.")
    script = work / "_update.sh"
    script.write_text(
        _SCRIPT.format(pid=os.getpid(), root=home.root, old=home.version, new=version, finished=FINISHED),
        encoding="utf-8",
    )
    (home.root / FINISHED).unlink(missing_ok=True)
    process = subprocess.Popen(["bash", str(script)], cwd=home.root)
    # It outlives the listener.
    process.returncode = 0
    say("Runner will exit shortly for update, should be back online within 10 seconds.")
    say("Runner update process finished.")
