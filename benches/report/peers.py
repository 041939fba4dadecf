"""What scripts in benches/peers share: frames, capture files, and huge pages for DPDK."""

import struct

PAGES = "/proc/sys/vm/nr_hugepages"


def checksum(data):
    """Returns the Internet checksum (RFC 1071)."""
    words = sum(struct.unpack(f"!{len(data) // 2}H", data + b"\0" * (len(data) % 2)))
    words = (words & 0xFFFF) + (words >> 16)
    return ~((words & 0xFFFF) + (words >> 16)) & 0xFFFF


def ipv4(source, destination, payload, protocol=17):
    """Returns a packet with these addresses of four bytes each."""
    header = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(payload), 1, 0, 64, protocol, 0, source, destination)
    return header[:10] + struct.pack("!H", checksum(header)) + header[12:] + payload


def write_capture(path, timed):
    """Writes (time in milliseconds, frame) pairs as a pcap file."""
    with open(path, "wb") as file:
        file.write(struct.pack("=IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 65535, 1))
        for at, frame in timed:
            file.write(struct.pack("=IIII", at // 1000, at % 1000 * 1000, len(frame), len(frame)) + frame)


def change_huge_pages(by):
    """Changes the number of huge pages of 2 MiB; other programs may change it too, so nothing absolute is written."""
    with open(PAGES) as file:
        now = int(file.read())
    with open(PAGES, "w") as file:
        file.write(str(max(0, now + by)))
    with open(PAGES) as file:
        return int(file.read()) - now


def reserve_huge_pages(wanted):
    """Reserves huge pages; returns the number that the machine gave."""
    got = change_huge_pages(wanted)
    if got < wanted:
        # Free memory in small pieces is joined on demand (the kernel's admin-guide/sysctl/vm).
        with open("/proc/sys/vm/compact_memory", "w") as file:
            file.write("1")
        got += change_huge_pages(wanted - got)
    return got
