"""Steps of jobs that use a machine as jobs on GitHub's own runners do: as root, with docker, services and cron."""

from __future__ import annotations

#: Before the other steps: cron starts its jobs at the beginning of a minute.
CRON = """
set -eux
echo '* * * * * root touch /run/cron-was-here' | sudo tee /etc/cron.d/job
sudo chmod 644 /etc/cron.d/job
"""
PACKAGE = """
set -eux
[ "$(id -un)" = runner ]
[ "$(sudo id -u)" = 0 ]
mkdir -p package/DEBIAN package/usr/bin
cat >package/DEBIAN/control <<END
Package: job-package
Version: 1
Architecture: all
Maintainer: Test <test@example.com>
Description: Package of a test
END
printf '#!/bin/sh\\necho hello from a package\\n' >package/usr/bin/job-package
chmod 755 package/usr/bin/job-package
dpkg-deb --root-owner-group --build package /tmp/job-package.deb
sudo apt-get install -y /tmp/job-package.deb
[ "$(job-package)" = 'hello from a package' ]
"""
DOCKER = """
set -eux
mkdir -p image/bin image/www
cp /bin/busybox image/bin/
echo hello from a container >image/www/index.html
tar -C image -c . | docker import - job-image
docker run --rm job-image /bin/busybox echo it runs
docker run --rm --privileged job-image /bin/busybox echo it runs
docker run --detach --name service --publish 18080:80 job-image /bin/busybox httpd -f -h /www
for _ in $(seq 60); do ! curl -sf http://127.0.0.1:18080/ || break; sleep 0.5; done
[ "$(curl -sf http://127.0.0.1:18080/)" = 'hello from a container' ]
"""
SERVICE = """
set -eux
printf '[Service]\\nExecStart=/bin/sleep 100000\\n[Install]\\nWantedBy=multi-user.target\\n' |
  sudo tee /etc/systemd/system/job.service
sudo systemctl daemon-reload
sudo systemctl enable --now job.service
systemctl is-active job.service
"""
#: Changes that only root can make, and a process that outlives the job.
LEAVE_TRACES = """
set -eux
sudo touch /etc/left /usr/bin/left /root/left /home/left /dev/shm/left /tmp/left /var/tmp/left
sudo sh -c 'env -i setsid sleep 100001 >/dev/null 2>&1 </dev/null &'
"""
CRON_RAN = """
set -eu
for _ in $(seq 180); do [ ! -e /run/cron-was-here ] || exit 0; sleep 1; done
exit 1
"""
TYPICAL = (CRON, PACKAGE, DOCKER, SERVICE, LEAVE_TRACES, CRON_RAN)
#: Fails if it finds anything of the job above.
IS_CLEAN = """
set -ux
! command -v job-package || exit 11
! dpkg -s job-package || exit 12
[ -z "$(docker images -q)$(docker ps -aq)" ] || exit 13
! systemctl cat job.service || exit 14
[ ! -e /etc/cron.d/job ] && [ ! -e /run/cron-was-here ] || exit 15
! pgrep -f 'sleep 10000' || exit 16
for name in /etc/left /usr/bin/left /home/left /dev/shm/left /tmp/left /var/tmp/left; do [ ! -e $name ] || exit 17; done
sudo test ! -e /root/left || exit 18
"""
#: Fails if the job can reach the metadata service, or read the agent's state.
IS_CONFINED = """
set -ux
! curl -sS --max-time 3 http://169.254.169.254/latest/meta-data/ || exit 21
! sudo curl -sS --max-time 3 http://169.254.169.254/latest/meta-data/ || exit 22
! sudo cat /var/lib/remuda/agent.env || exit 23
! sudo ls /opt/remuda/bin/remuda || exit 24
[ "$(sudo cat /proc/1/uid_map | wc -l)" = 1 ] && ! grep -E '^ *0 +0 ' /proc/self/uid_map || exit 25
"""
