# Packets before and after the actions of rules, both made by scapy. Scapy fills lengths and checksums again,
# so a rule must leave them right.
from scapy.contrib.geneve import GENEVE, GeneveOptions
from scapy.contrib.mpls import MPLS
from scapy.layers.inet6 import *

DATA = bytes(range(33))


def case(pattern, actions, before, after):
    print(f'ingress prio 1: {pattern} => {actions}')
    emit(before)
    emit(after)


def edited(packet, *edits):
    packet = packet.copy()
    for edit in edits:
        edit(packet)
    return packet


def put(layer, **fields):
    def edit(packet):
        for name, value in fields.items():
            setattr(packet[layer], name, value)
    return edit


E = Ether(src='02:00:00:00:00:01', dst='02:00:00:00:00:02')
HBH = IPv6ExtHdrHopByHop(options=[RouterAlert()])
DST = IPv6ExtHdrDestOpt(options=[PadN(optdata=b'\0\0\0\0')])
# Scapy includes the home address in the checksum only if the header has no other options. It adds padding.
HOME = IPv6ExtHdrDestOpt(options=[HAO(hoa='fd00::8')])
ROUTING_LEFT = IPv6ExtHdrRouting(addresses=['fd00::9', 'fd00::a'], segleft=1)
ROUTING_DONE = IPv6ExtHdrRouting(addresses=['fd00::9'], segleft=0)

links = [
    ('eth', E),
    ('eth / vlan', E / Dot1Q(vlan=5, prio=1)),
    ('eth / vlan / vlan', E / Dot1AD(vlan=7, prio=3) / Dot1Q(vlan=5, id=1)),
    ('eth / mpls', E / MPLS(label=100, s=0, ttl=9) / MPLS(label=101, s=1, ttl=9)),
]
networks = [
    ('ipv4', IP(src='10.0.0.1', dst='10.0.0.2', tos=0xb9, ttl=64, id=77)),
    ('ipv4', IP(src='10.0.0.1', dst='10.0.0.2', tos=2, ttl=2, flags='DF',
                options=[IPOption_Router_Alert(), IPOption_NOP()])),
    ('ipv6', IPv6(src='fd00::1', dst='fd00::2', tc=0xb9, fl=0x12345, hlim=64)),
    ('ipv6', IPv6(src='fd00::1', dst='fd00::2', hlim=2) / HBH / DST),
    ('ipv6', IPv6(src='fd00::1', dst='fd00::2') / ROUTING_LEFT),
    ('ipv6', IPv6(src='fd00::1', dst='fd00::2') / ROUTING_DONE),
    ('ipv6', IPv6(src='fd00::1', dst='fd00::2') / HOME),
]
transports = [
    ('udp', lambda v6: UDP(sport=40002, dport=40003) / DATA),
    ('udp', lambda v6: UDP(sport=40002, dport=40003)),
    ('tcp', lambda v6: TCP(sport=40002, dport=40003, seq=5, options=[('MSS', 1400), ('Timestamp', (1, 2))]) / DATA),
    ('icmp', lambda v6: ICMPv6EchoRequest(id=3, data=DATA) if v6 else ICMP(id=3) / DATA),
]

# `set` and `dec-ttl`, one by one and together.
for link_pattern, link in links:
    for ip, network in networks:
        v6 = ip == 'ipv6'
        layer = IPv6 if v6 else IP
        for transport, payload in transports:
            before = link / network / payload(v6)
            name = 'icmpv6' if v6 and transport == 'icmp' else transport
            pattern = f'{link_pattern} / {ip} / {name}'
            sets = [
                ('set eth dst 02:aa:bb:cc:dd:ee', put(Ether, dst='02:aa:bb:cc:dd:ee')),
                ('set eth src 02:aa:bb:cc:dd:ef', put(Ether, src='02:aa:bb:cc:dd:ef')),
            ]
            hops = network.hlim if v6 else network.ttl
            if v6:
                sets += [
                    ('set ipv6 src 2001:db8::1:ffff', put(IPv6, src='2001:db8::1:ffff')),
                    ('set ipv6 dst 2001:db8::2:ffff', put(IPv6, dst='2001:db8::2:ffff')),
                    ('set ipv6 dscp 46', put(IPv6, tc=46 << 2 | network.tc & 3)),
                    ('dec-ttl', put(IPv6, hlim=hops - 1)),
                    ('set ipv6 hops 200', put(IPv6, hlim=200)),
                ]
            else:
                sets += [
                    ('set ipv4 src 192.0.2.255', put(IP, src='192.0.2.255')),
                    ('set ipv4 dst 198.51.100.254', put(IP, dst='198.51.100.254')),
                    ('set ipv4 dscp 46', put(IP, tos=46 << 2 | network.tos & 3)),
                    ('dec-ttl', put(IP, ttl=hops - 1)),
                    ('set ipv4 ttl 200', put(IP, ttl=200)),
                ]
            if transport != 'icmp':
                l4 = UDP if transport == 'udp' else TCP
                sets += [
                    (f'set {transport} src 65535', put(l4, sport=65535)),
                    (f'set {transport} dst 40001', put(l4, dport=40001)),
                ]
            if 'vlan' in link_pattern:
                tag = Dot1AD if link_pattern.count('vlan') == 2 else Dot1Q
                sets += [
                    ('set vlan vid 4000', put(tag, vlan=4000)),
                    ('set vlan pcp 6', put(tag, prio=6)),
                    ('set vlan dei 1', put(tag, id=1)),
                ]
            for action, edit in sets:
                case(pattern, action, before, edited(before, edit))
            case(pattern, ', '.join(a for a, _ in sets), before, edited(before, *[e for _, e in sets]))

# An absent UDP checksum stays absent. The packet may be padded.
absent = E / IP(src='10.0.0.1', dst='10.0.0.2') / UDP(sport=40006, dport=40007, chksum=0) / b'abc'
absent /= Padding(b'\xff' * 20)
after = edited(absent, put(IP, dst='10.9.9.9'), put(UDP, sport=7))
case('ipv4 / udp', 'set ipv4 dst 10.9.9.9, set udp src 7', absent, after)

# Fragments: only the first one has the checksum.
for size in 200, 201:
    whole = E / IP(src='10.0.0.1', dst='10.0.0.2', id=9) / UDP(sport=40006, dport=40007) / (b'x' * size)
    after = edited(whole, put(IP, dst='10.44.0.1', ttl=63))
    for b, a in zip(fragment(Ether(bytes(whole)), 64), fragment(Ether(bytes(after)), 64)):
        case('ipv4', 'set ipv4 dst 10.44.0.1, dec-ttl', b, a)
    datagram = UDP(sport=40006, dport=40007) / (b'x' * size)
    whole = E / IPv6(src='fd00::1', dst='fd00::2') / IPv6ExtHdrFragment(id=5) / datagram
    after = edited(whole, put(IPv6, src='fd00::44', hlim=63))
    pieces = [[IPv6(bytes(p[IPv6])) for p in fragment6(IPv6(bytes(w[IPv6])), 128)] for w in (whole, after)]
    for b, a in zip(*pieces):
        case('ipv6', 'set ipv6 src fd00::44, dec-ttl', E / b, E / a)

# VLAN tags.
payloads = [
    ('ipv4', IP(src='10.0.0.1', dst='10.0.0.2') / UDP(sport=40004, dport=40005) / DATA),
    ('ipv6', IPv6(src='fd00::1', dst='fd00::2') / TCP(sport=40004, dport=40005)),
    ('eth type 0x88b5', b'\x01\x02\x03' * 20),
]
for pattern, inside in payloads:
    link = E.copy()
    if isinstance(inside, bytes):
        link.type = 0x88b5
        inside = Raw(inside)
    kind = link.type if 'type' in link.fields else {'ipv4': 0x800, 'ipv6': 0x86dd}[pattern]
    bare = Ether(src=link.src, dst=link.dst)
    one = bare / Dot1Q(vlan=5, prio=1, type=kind) / inside
    two = bare / Dot1AD(vlan=9, id=1) / Dot1Q(vlan=5, prio=1, type=kind) / inside
    link.type = kind
    case(pattern, 'push-vlan vid 5 pcp 1', link / inside, one)
    case('vlan', 'push-vlan vid 9 dei 1 tpid 0x88a8', one, two)
    case('vlan', 'pop-vlan', two, one)
    case('vlan / vlan', 'pop-vlan, pop-vlan', two, link / inside)
    case('vlan', 'pop-vlan, push-vlan vid 77 tpid 0x88a8', one, bare / Dot1AD(vlan=77, type=kind) / inside)

# Tunnels that carry frames: pattern, headers behind the outer IP header, and protocol of the outer IP header.
def gre(**fields):
    return GRE(**fields)


GPE = dict(flags='Instance+NextProtocol', vni=42)
l2_tunnels = [
    ('udp / vxlan vni 42', UDP(sport=50000, dport=4789, chksum=0) / VXLAN(vni=42, flags='Instance'), 17),
    ('udp / vxlan vni 42', UDP(sport=50000, dport=4789) / VXLAN(vni=42, flags='Instance'), 17),
    ('udp / vxlan-gpe next 3', UDP(sport=50000, dport=4790) / VXLAN(NextProtocol=3, **GPE), 17),
    ('udp / geneve proto 0x6558', UDP(sport=50000, dport=6081) / GENEVE(proto=0x6558, vni=42), 17),
    ('udp / geneve proto 0x6558', UDP(sport=50000, dport=6081)
     / GENEVE(proto=0x6558, vni=42, options=[GeneveOptions(classid=0x102, type=1, data=b'12345678')]), 17),
    ('gre proto 0x6558', gre(proto=0x6558), 47),
    ('gre proto 0x6558 key 4711', gre(proto=0x6558, key_present=1, key=4711), 47),
    ('udp / mpls / eth', UDP(sport=50000, dport=6635) / MPLS(label=16, s=0, ttl=3) / MPLS(label=17, s=1, ttl=3), 17),
]
# Headers that can be decapsulated but not encapsulated.
l2_tunnels_in = [
    ('gre proto 0x6558',
     gre(proto=0x6558, chksum_present=1, key_present=1, seqnum_present=1, key=1, sequence_number=7), 47),
]
l3_tunnels = {
    4: [
        ('', None, 4),
        ('gre proto 0x0800', gre(proto=0x800), 47),
        ('udp / vxlan-gpe next 1', UDP(sport=50000, dport=4790) / VXLAN(NextProtocol=1, **GPE), 17),
        ('udp / geneve proto 0x0800', UDP(sport=50000, dport=6081, chksum=0) / GENEVE(proto=0x800, vni=42), 17),
        ('udp / mpls / inner ipv4', UDP(sport=50000, dport=6635) / MPLS(label=16, s=1, ttl=3), 17),
        ('gre / mpls / inner ipv4', gre(proto=0x8847) / MPLS(label=16, s=1, ttl=3), 47),
    ],
    6: [
        ('', None, 41),
        ('gre proto 0x86dd key 9', gre(proto=0x86dd, key_present=1, key=9), 47),
        ('udp / vxlan-gpe next 2', UDP(sport=50000, dport=4790) / VXLAN(NextProtocol=2, **GPE), 17),
        ('udp / geneve proto 0x86dd', UDP(sport=50000, dport=6081) / GENEVE(proto=0x86dd, vni=42), 17),
    ],
}
INNER = Ether(src='02:00:00:00:01:01', dst='02:00:00:00:01:02')
BROADCAST = Ether(src='02:00:00:00:01:01', dst='ff:ff:ff:ff:ff:ff')
inner_frames = [
    INNER / IP(src='192.168.0.1', dst='192.168.0.2', tos=1) / TCP(sport=40004, dport=40005) / DATA,
    INNER / Dot1Q(vlan=3) / IPv6(src='fd01::1', dst='fd01::2', tc=1) / UDP(sport=40004, dport=40005) / DATA,
    # As bytes, because scapy would move this padding out of the tunnel.
    Raw(bytes(BROADCAST / ARP(psrc='192.168.0.1', pdst='192.168.0.2') / Padding(b'\0' * 18))),
    Ether(src='02:00:00:00:01:01', dst='02:00:00:00:01:02', type=0x88b5) / (b'\x11' * 47),
]
inner_packets = {
    4: [IP(src='192.168.0.1', dst='192.168.0.2', tos=1) / TCP(sport=40004, dport=40005) / DATA,
        IP(src='192.168.0.1', dst='192.168.0.2', options=[IPOption_NOP()]) / UDP(sport=40004, dport=40005)],
    6: [IPv6(src='fd01::1', dst='fd01::2', tc=1) / UDP(sport=40004, dport=40005) / DATA,
        IPv6(src='fd01::1', dst='fd01::2') / DST / TCP(sport=40004, dport=40005)],
}


def outers(protocol):
    """Yields outer headers up to IP, with the pattern that matches them."""
    link = Ether(src='02:00:00:00:00:0a', dst='02:00:00:00:00:0b')
    yield 'ipv4', link / IP(src='172.16.0.1', dst='172.16.0.2', flags='DF', id=0, proto=protocol, ttl=50, tos=0xb8)
    yield 'ipv6', link / IPv6(src='fd02::1', dst='fd02::2', nh=protocol, hlim=50, tc=0xb8, fl=0x54321)
    tagged = link / Dot1Q(vlan=12)
    yield 'vlan / ipv4', tagged / IP(src='172.16.0.1', dst='172.16.0.2', flags='DF', id=0, proto=protocol, ttl=50)


def marked(packet, ecn):
    if IPv6 in packet:
        return edited(packet, put(IPv6, tc=packet[IPv6].tc & 0xfc | ecn))
    return edited(packet, put(IP, tos=packet[IP].tos & 0xfc | ecn))


for pattern, tunnel, protocol in l2_tunnels + l2_tunnels_in:
    for ip, outer in outers(protocol):
        for n, frame in enumerate(inner_frames):
            before = outer / tunnel / frame
            named = f'{ip} / {pattern}'
            case(named, 'decap l2', before, frame)
            case(named, 'decap l2', before / Padding(b'\xee' * 9), frame)
            if n < 2 and 'mpls' not in pattern:
                layer, decrement = ('ipv4', put(IP, ttl=63)) if n == 0 else ('ipv6', put(IPv6, hlim=63))
                more = f'{named} / eth / {"vlan / " if n else ""}{layer}'
                after = edited(frame, decrement, put(Ether, src='02:01:01:01:01:01'))
                case(more, 'decap l2, dec-ttl, set eth src 02:01:01:01:01:01', before, after)
                # Outer congestion is copied to the inner packet (RFC 6040), which is ECT(1).
                case(more, 'decap l2', marked(outer, 3) / tunnel / frame, marked(frame, 3))
                case(more, 'decap l2', marked(outer, 1) / tunnel / frame, frame)
            if n == 0:
                tagged = Ether(src=frame.src, dst=frame.dst) / Dot1Q(vlan=99) / frame[IP]
                case(named, 'decap l2, push-vlan vid 99', before, tagged)

for version, tunnels in l3_tunnels.items():
    for pattern, tunnel, protocol in tunnels:
        for ip, outer in outers(protocol):
            for packet in inner_packets[version]:
                before = outer / tunnel / packet if tunnel else outer / packet
                named = f'{ip} / {pattern}' if pattern else f'{ip} proto {protocol}'
                kind = 0x800 if version == 4 else 0x86dd
                link = Ether(src='02:00:00:00:02:01', dst='02:00:00:00:02:02', type=kind)
                case(named, f'decap l3 {bytes(link).hex()}', before, link / packet)
                case(named, f'decap l3 {bytes(link).hex()}', before / Padding(b'\xee' * 7), link / packet)
                tagged = Ether(src='02:00:00:00:02:01', dst='02:00:00:00:02:02') / Dot1Q(vlan=6, type=kind)
                more = named if 'inner' in named else f'{named} / inner ipv{version}'
                after = edited(tagged / packet, put(IP, ttl=63) if version == 4 else put(IPv6, hlim=63))
                case(more, f'decap l3 {bytes(tagged).hex()}, dec-ttl', before, after)

# Encapsulation: the headers of the rule are those of scapy without payload.
pseudowire = Ether(src='02:00:00:00:00:0a', dst='02:00:00:00:00:0b', type=0x8847) / MPLS(label=5, s=1, ttl=64)
for frame in inner_frames:
    for pattern, tunnel, protocol in l2_tunnels:
        for ip, outer in outers(protocol):
            case('any', f'encap l2 {bytes(outer / tunnel).hex()}', frame, outer / tunnel / frame)
    case('any', f'encap l2 {bytes(pseudowire).hex()}', frame, pseudowire / frame)
    case('mpls / eth', 'decap l2', pseudowire / frame, frame)
for version, tunnels in l3_tunnels.items():
    for pattern, tunnel, protocol in tunnels:
        for ip, outer in outers(protocol):
            for packet in inner_packets[version]:
                head = outer / tunnel if tunnel else outer
                for link in E, E / Dot1Q(vlan=4):
                    case(f'ipv{version}', f'encap l3 {bytes(head).hex()}', link / packet, head / packet)
                    padded = link / packet / Padding(b'\xdd' * 5)
                    case(f'ipv{version}', f'encap l3 {bytes(head).hex()}', padded, head / packet)
