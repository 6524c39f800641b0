"""Connects standard input and output with a TCP port. qemu starts it for each connection to the metadata service."""

import os
import socket
import sys
import threading

CHUNK = 65_536


def main() -> None:
    with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as connection:

        def send() -> None:
            while chunk := os.read(0, CHUNK):
                connection.sendall(chunk)
            connection.shutdown(socket.SHUT_WR)

        threading.Thread(target=send, daemon=True).start()
        while chunk := connection.recv(CHUNK):
            while chunk:
                chunk = chunk[os.write(1, chunk) :]


if __name__ == "__main__":
    main()
