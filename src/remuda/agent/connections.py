"""Connections of sandboxes in the machine's connection table, which outlive the network of their sandbox.

The machine translates the addresses of sandboxes, so that its kernel tracks each of their connections. The firewall
script of the user data limits them and gives them a mark. The agent deletes all connections with this mark when it
discards a sandbox: no later run must find them, or the table full of them.
"""

from __future__ import annotations

import os
import socket
import struct

#: Connection mark of sandboxes, which `bootstrap.sh` sets.
MARK = 0x52454D55
#: Seconds until the kernel must have answered.
LIMIT_S = 10.0

# linux/netlink.h, linux/netfilter/nfnetlink.h, linux/netfilter/nfnetlink_conntrack.h
_NETLINK_NETFILTER = 12
_NLM_F_REQUEST, _NLM_F_ACK = 0x1, 0x4
_NLMSG_ERROR = 2
_CTNETLINK_DELETE = 1 << 8 | 2
_FILTER = ((8, MARK), (21, 0xFFFFFFFF))  # CTA_MARK, CTA_MARK_MASK


def delete_all() -> None:
    """Delete the connections of all sandboxes. Raises `OSError` if the kernel does not."""
    attributes = b"".join(struct.pack("=HH", 8, kind) + value.to_bytes(4, "big") for kind, value in _FILTER)
    # The header of netfilter: all address families, version 0, no resource.
    body = struct.pack("=BBH", socket.AF_UNSPEC, 0, 0) + attributes
    header = struct.pack("=IHHII", 16 + len(body), _CTNETLINK_DELETE, _NLM_F_REQUEST | _NLM_F_ACK, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER) as kernel:
        kernel.settimeout(LIMIT_S)
        kernel.sendto(header + body, (0, 0))
        answer = kernel.recv(4096)
    kind, error = struct.unpack_from("=4xH10xi", answer)
    if kind != _NLMSG_ERROR or error:
        raise OSError(-error, f"cannot delete the connections of sandboxes: {os.strerror(-error)}")
