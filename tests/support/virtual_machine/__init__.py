"""Virtual machines with a real kernel and a real systemd, booted in qemu from a Debian image."""
