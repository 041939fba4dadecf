//! Selection of the packets that a port takes ([`Bifurcation`]), as a part of programs in the kernel.
//!
//! Only the first fragment of a datagram names its port. A program that decides for the kernel too remembers the first
//! fragments that the port took ([`new_fragment_map`]), and takes the later ones of these datagrams.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::assembler::Register::*;
use super::assembler::{Assembler, Condition, Label, Width, be16, function, load_bytes};
use super::bpf::{MAP_LRU_HASH, Map, Program, ProgramKind};
use crate::port::Bifurcation;

// struct __sk_buff
const PACKET_TYPE: i16 = 4;
const VLAN_PRESENT: i16 = 20;

/// Stack offset of the first byte of the frame. With this offset, the IP addresses are aligned.
const FRAME: i16 = -90;
/// Bytes of an Ethernet header, an IPv4 header without options, and both ports.
const IPV4_HEAD: i32 = 38;
/// Bytes of an Ethernet header, an IPv6 header and 8 bytes more.
const IPV6_HEAD: i32 = 62;
/// Stack offset of the ports, if they are not in the first bytes.
const PORTS: i16 = FRAME + 62;
/// Stack offset of the key of a fragmented datagram: source, destination, identification and IP version.
const KEY: i16 = -136;
const KEY_BYTES: i16 = 40;
/// Stack offset of the value of that key, which has no meaning.
const VALUE: i16 = KEY - 8;
/// Most fragmented datagrams that a program remembers.
const DATAGRAMS: u32 = 4096;

const UDP: u32 = 17;
const FRAGMENT: u32 = 44;

/// Creates the map by which a program takes later fragments; `None` if the port does not want them.
pub(crate) fn new_fragment_map(bifurcation: &Bifurcation) -> io::Result<Option<Map>> {
    let new = || Map::with_keys(MAP_LRU_HASH, KEY_BYTES as u32, 4, DATAGRAMS);
    bifurcation.later_fragments.then(new).transpose()
}

/// Later fragments of UDP datagrams that a program takes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum LaterFragments {
    /// None.
    None,
    /// Fragments of datagrams whose first one it took, by the map with this descriptor.
    Known(i32),
    /// All.
    All,
}

impl LaterFragments {
    /// Returns the fragments for which a map of [`new_fragment_map`] is.
    pub(crate) fn known(map: Option<&Map>) -> Self {
        map.map_or(Self::None, |map| Self::Known(map.raw_fd()))
    }
}

/// Appends code that jumps to `taken` if the port takes the frame, else to `others`. R6 holds the context, `load`
/// is the function that reads from it. Uses the stack from -144 to -24, and clobbers R0 to R5, R7 and R8.
pub(crate) fn select(
    a: &mut Assembler,
    it: &Bifurcation,
    load: i32,
    later: LaterFragments,
    [taken, others]: [Label; 2],
) {
    let mut ipv4: Vec<Ipv4Addr> = Vec::new();
    let mut ipv6: Vec<Ipv6Addr> = Vec::new();
    for address in &it.addresses {
        match address {
            IpAddr::V4(address) => ipv4.push(*address),
            IpAddr::V6(address) => ipv6.push(*address),
        }
    }
    let steps = Steps { it, load, later, taken, others };
    a.set(R7, 0);
    // The kernel refuses a program with code that no jump leads to, as `taken` would be without ports and protocols.
    a.jump_if_32(R7, Condition::NotEqual, 0, taken);
    load_bytes(a, load, FRAME, IPV4_HEAD, others);
    a.load(Width::Half, R4, R10, FRAME + 12);
    if !ipv4.is_empty() {
        let other = a.label();
        a.jump_if_32(R4, Condition::NotEqual, be16(0x0800), other);
        steps.ipv4(a, &ipv4);
        a.bind(other);
    }
    if !ipv6.is_empty() {
        a.jump_if_32(R4, Condition::NotEqual, be16(0x86dd), others);
        steps.ipv6(a, &ipv6);
    } else {
        a.jump(others);
    }
}

struct Steps<'b> {
    it: &'b Bifurcation,
    load: i32,
    later: LaterFragments,
    taken: Label,
    others: Label,
}

/// Fields of the IP header of a fragment, by their stack offsets.
struct FragmentFields {
    version: i32,
    source: i16,
    destination: i16,
    /// Bytes of an address.
    address: i16,
    identification: (Width, i16),
    /// Field with the offset of the fragment, and the bit in it that says that others follow.
    offset: i16,
    more: u32,
}

const IPV4_FRAGMENT: FragmentFields = FragmentFields {
    version: 4,
    source: FRAME + 26,
    destination: FRAME + 30,
    address: 4,
    identification: (Width::Half, FRAME + 18),
    offset: FRAME + 20,
    more: be16(0x2000),
};
const IPV6_FRAGMENT: FragmentFields = FragmentFields {
    version: 6,
    source: FRAME + 22,
    destination: FRAME + 38,
    address: 16,
    identification: (Width::Word, FRAME + 58),
    offset: FRAME + 56,
    more: be16(1),
};

impl FragmentFields {
    /// Writes the key of the datagram.
    fn write_key(&self, a: &mut Assembler) {
        for at in (VALUE..KEY + KEY_BYTES).step_by(8) {
            a.store_value(Width::Double, R10, at, 0);
        }
        for (from, to) in [(self.source, KEY), (self.destination, KEY + 16)] {
            for at in (0..self.address).step_by(4) {
                a.load(Width::Word, R4, R10, from + at);
                a.store(Width::Word, R10, to + at, R4);
            }
        }
        let (width, from) = self.identification;
        a.load(width, R4, R10, from);
        a.store(Width::Word, R10, KEY + 32, R4);
        a.store_value(Width::Word, R10, KEY + 36, self.version);
    }
}

/// Calls a helper for the key in a map.
fn call_for_key(a: &mut Assembler, helper: i32, map: i32) {
    a.load_map(R1, map);
    a.copy(R2, R10);
    a.add(R2, KEY.into());
    a.copy(R3, R10);
    a.add(R3, VALUE.into());
    a.set(R4, 0);
    a.call(helper);
}

impl Steps<'_> {
    fn ipv4(&self, a: &mut Assembler, addresses: &[Ipv4Addr]) {
        let (ours, no_options) = (a.label(), a.label());
        a.load(Width::Word, R4, R10, FRAME + 30);
        for address in addresses {
            a.jump_if_32(R4, Condition::Equal, u32::from_ne_bytes(address.octets()), ours);
        }
        a.jump(self.others);
        a.bind(ours);
        a.load(Width::Byte, R8, R10, FRAME + 23);
        self.protocols(a);
        let later = a.label();
        a.load(Width::Half, R4, R10, FRAME + 20);
        a.jump_if_32(R4, Condition::Bits, be16(0x1fff), later);
        a.load(Width::Byte, R7, R10, FRAME + 14);
        a.and(R7, 0x0f);
        a.shift_left(R7, 2);
        a.load(Width::Half, R4, R10, FRAME + 36);
        a.jump_if(R7, Condition::Equal, 20, no_options);
        a.add(R7, 14);
        load_bytes(a, self.load, PORTS, 4, self.others);
        a.load(Width::Half, R4, R10, PORTS + 2);
        a.bind(no_options);
        self.ports(a, Some(&IPV4_FRAGMENT));
        a.bind(later);
        self.later(a, &IPV4_FRAGMENT);
    }

    fn ipv6(&self, a: &mut Assembler, addresses: &[Ipv6Addr]) {
        let (ours, whole) = (a.label(), a.label());
        a.set(R7, IPV4_HEAD);
        load_bytes(a, self.load, FRAME + IPV4_HEAD as i16, IPV6_HEAD - IPV4_HEAD, self.others);
        for address in addresses {
            let other = a.label();
            for (word, at) in address.octets().chunks_exact(4).zip((FRAME + 38..).step_by(4)) {
                a.load(Width::Word, R4, R10, at);
                let word = u32::from_ne_bytes([word[0], word[1], word[2], word[3]]);
                a.jump_if_32(R4, Condition::NotEqual, word, other);
            }
            a.jump(ours);
            a.bind(other);
        }
        a.jump(self.others);
        a.bind(ours);
        a.load(Width::Byte, R8, R10, FRAME + 20);
        a.load(Width::Half, R4, R10, FRAME + 56);
        a.jump_if_32(R8, Condition::NotEqual, FRAGMENT, whole);
        a.load(Width::Byte, R8, R10, FRAME + 54);
        self.protocols(a);
        let later = a.label();
        a.jump_if_32(R4, Condition::Bits, be16(0xfff8), later);
        a.set(R7, IPV6_HEAD);
        load_bytes(a, self.load, PORTS, 4, self.others);
        a.load(Width::Half, R4, R10, PORTS + 2);
        self.ports(a, Some(&IPV6_FRAGMENT));
        a.bind(later);
        self.later(a, &IPV6_FRAGMENT);
        a.bind(whole);
        self.protocols(a);
        self.ports(a, None);
    }

    /// Decides about a later fragment of a UDP datagram.
    fn later(&self, a: &mut Assembler, fields: &FragmentFields) {
        match self.later {
            LaterFragments::None => a.jump(self.others),
            LaterFragments::All => a.jump(self.taken),
            LaterFragments::Known(map) => {
                fields.write_key(a);
                call_for_key(a, function::MAP_LOOKUP_ELEM, map);
                a.jump_if(R0, Condition::Equal, 0, self.others);
                a.jump(self.taken);
            }
        }
    }

    /// Takes packets with one of the protocols. What continues is UDP. R8 holds the protocol.
    fn protocols(&self, a: &mut Assembler) {
        for protocol in &self.it.protocols {
            a.jump_if_32(R8, Condition::Equal, u32::from(*protocol), self.taken);
        }
        a.jump_if_32(R8, Condition::NotEqual, UDP, self.others);
    }

    /// Takes packets with one of the destination ports. R4 holds the port. A packet that may be the first fragment of a
    /// datagram has these fields.
    fn ports(&self, a: &mut Assembler, fields: Option<&FragmentFields>) {
        let (LaterFragments::Known(map), Some(fields)) = (self.later, fields) else {
            self.match_ports(a, self.taken);
            return a.jump(self.others);
        };
        let [ours, remember, forget] = [(); 3].map(|()| a.label());
        self.match_ports(a, ours);
        a.load(Width::Half, R4, R10, fields.offset);
        a.jump_if_32(R4, Condition::Bits, fields.more, forget);
        a.jump(self.others);
        a.bind(ours);
        a.load(Width::Half, R4, R10, fields.offset);
        a.jump_if_32(R4, Condition::Bits, fields.more, remember);
        a.jump(self.taken);
        a.bind(remember);
        fields.write_key(a);
        call_for_key(a, function::MAP_UPDATE_ELEM, map);
        a.jump(self.taken);
        // An earlier datagram may have had the same identification.
        a.bind(forget);
        fields.write_key(a);
        call_for_key(a, function::MAP_DELETE_ELEM, map);
        a.jump(self.others);
    }

    fn match_ports(&self, a: &mut Assembler, ours: Label) {
        for port in &self.it.udp_ports {
            a.jump_if_32(R4, Condition::Equal, be16(*port), ours);
        }
    }
}

/// Loads a program of `kind` for socket buffers that returns `taken` for frames that the port takes, and else `others`.
pub(crate) fn load_program(
    kind: ProgramKind,
    name: &str,
    bifurcation: &Bifurcation,
    [taken, others]: [i32; 2],
) -> io::Result<Program> {
    let mut a = Assembler::default();
    let (is_taken, is_other) = (a.label(), a.label());
    a.copy(R6, R1);
    // Frames for other hosts, and those with a VLAN tag, which the kernel has taken out of the frame.
    for field in [PACKET_TYPE, VLAN_PRESENT] {
        a.load(Width::Word, R4, R6, field);
        a.jump_if_32(R4, Condition::NotEqual, 0, is_other);
    }
    // A filter only selects copies, so it may take too much.
    let map = match kind {
        ProgramKind::SocketFilter => None,
        _ => new_fragment_map(bifurcation)?,
    };
    let later = match kind {
        ProgramKind::SocketFilter if bifurcation.later_fragments => LaterFragments::All,
        _ => LaterFragments::known(map.as_ref()),
    };
    select(&mut a, bifurcation, function::SKB_LOAD_BYTES, later, [is_taken, is_other]);
    a.bind(is_taken);
    a.set(R0, taken);
    a.exit();
    a.bind(is_other);
    a.set(R0, others);
    a.exit();
    let code = a.finish().map_err(io::Error::other)?;
    Ok(Program::load(kind, &code, name, 0, 0)?)
}

#[cfg(test)]
pub(crate) mod tests {
    use wirepath_testlab::{Requirement, oracle, require};

    use super::*;

    /// Returns a selection of VXLAN and GRE packets, with the later fragments or without.
    pub(crate) fn selection(later_fragments: bool) -> Bifurcation {
        let addresses = ["10.9.0.1", "10.9.0.5", "fd00:9::1"].map(|text| text.parse().unwrap()).to_vec();
        Bifurcation { addresses, udp_ports: vec![4789, 6081], protocols: vec![47], later_fragments }
    }

    /// Returns frames that scapy has built, each with whether a port with [`selection`] takes it: always (1), only with
    /// later fragments (2), never (0). A filter with later fragments also takes (3).
    pub(crate) fn frames() -> Vec<(u8, Vec<u8>)> {
        let script = "
load = b'x' * 40
def out(verdict, packet, ether=None):
    # The address of the interface on which the kernel runs the program.
    emit((ether or Ether(dst='00:00:00:00:00:00', src='02:00:00:00:00:02'))/packet)
    print(verdict)
v4, v6 = IP(src='10.9.0.2', dst='10.9.0.1'), IPv6(src='fd00:9::2', dst='fd00:9::1')
for ip in [v4, v6]:
    out(1, ip/UDP(sport=50000, dport=4789)/load)
    out(1, ip/UDP(sport=4789, dport=6081)/load)
    out(0, ip/UDP(sport=4789, dport=4790)/load)
    out(0, ip/UDP(sport=4789, dport=3784)/load)
    out(0, ip/TCP(sport=50000, dport=179)/load)
    out(0, ip/TCP(sport=50000, dport=4789)/load)
    out(1, ip/GRE()/load)
out(1, IP(src='10.9.0.2', dst='10.9.0.5')/UDP(dport=4789)/load)
for dst in ['10.9.0.2', '10.9.0.255', '10.9.1.1', '224.0.0.1']:
    out(0, IP(src='10.9.0.2', dst=dst)/UDP(dport=4789)/load)
for dst in ['fd00:9::2', 'fd00:9:0:0:1::1', 'fe00:9::1', 'ff02::1']:
    out(0, IPv6(src='fd00:9::2', dst=dst)/UDP(dport=4789)/load)
out(0, v4/ICMP(type=3, code=4)/load)
out(0, v6/ICMPv6EchoRequest())
out(0, ARP(psrc='10.9.0.2', pdst='10.9.0.1'))
# Options, behind which another port would be found at the place of the port.
options = IP(src='10.9.0.2', dst='10.9.0.1', options=[IPOption(bytes([0x94, 4, 0x12, 0xb5])), IPOption_NOP()])
out(1, options/UDP(sport=50000, dport=4789)/load)
out(0, options/UDP(sport=50000, dport=53)/load)
# Fragments.
for port, first, later in [(4789, 1, 2), (53, 0, 3), (6081, 1, 2)]:
    for at, part in enumerate(fragment(v4/UDP(sport=50000, dport=port)/(b'x' * 100), fragsize=48)):
        out(later if at else first, part)
    parts = fragment6(v6/IPv6ExtHdrFragment()/UDP(sport=50000, dport=port)/(b'x' * 2000), 800)
    for at, part in enumerate(parts):
        out(later if at else first, part)
# A later one comes first.
for ip, parts in [(v4, fragment(IP(src='10.9.0.2', dst='10.9.0.1', id=77)/UDP(dport=4789)/(b'x' * 100), fragsize=48)),
    (v6, fragment6(v6/IPv6ExtHdrFragment(id=77)/UDP(dport=4789)/(b'x' * 2000), 800))]:
    out(3, parts[1])
    out(1, parts[0])
    out(2, parts[1])
for at, part in enumerate(fragment(v4/GRE()/(b'x' * 100), fragsize=48)):
    out(1, part)
for at, part in enumerate(fragment(v4/TCP(dport=179)/(b'x' * 100), fragsize=48)):
    out(0, part)
# VLAN tags and extension headers.
out(0, v4/UDP(dport=4789)/load, Ether(dst='00:00:00:00:00:00', src='02:00:00:00:00:02')/Dot1Q(vlan=7))
out(0, v6/IPv6ExtHdrDestOpt()/UDP(dport=4789)/load)
# Truncated.
out(0, Raw(bytes(v4/UDP(dport=4789))[:22]), Ether(dst='00:00:00:00:00:00', src='02:00:00:00:00:02', type=0x800))
";
        let none: [&[u8]; 0] = [];
        let output = oracle::scapy(&none, script);
        assert!(output.frames.len() > 40 && output.frames.len() == output.lines.len());
        output.lines.iter().map(|line| line.parse().unwrap()).zip(output.frames).collect()
    }

    #[test]
    fn programs_for_socket_buffers_take_tunnel_packets_only() {
        require!(Requirement::Root, Requirement::Kernel(6, 6), Requirement::Scapy);
        let frames = frames();
        for kind in [ProgramKind::TcxIngress, ProgramKind::SocketFilter] {
            for later_fragments in [false, true] {
                let program = load_program(kind, "wirepath_test", &selection(later_fragments), [7, 0]).unwrap();
                for (verdict, frame) in &frames {
                    let takes_all = matches!(kind, ProgramKind::SocketFilter) && *verdict == 3;
                    let expected = *verdict == 1 || later_fragments && (*verdict == 2 || takes_all);
                    // For filters, the kernel takes out the first Ethernet header before the run.
                    let is_filter = matches!(kind, ProgramKind::SocketFilter);
                    let frame = [&frame[..if is_filter { 14 } else { 0 }], frame].concat();
                    let found = program.test_run(&frame).unwrap();
                    assert_eq!(found == 7, expected, "{kind:?}, {later_fragments}: {frame:02x?}");
                }
            }
        }
        // Nothing at all, and as much as a configuration can have.
        let nothing = Bifurcation { addresses: vec!["10.9.0.1".parse().unwrap()], ..Bifurcation::default() };
        let addresses = (0..64).map(|n| Ipv6Addr::from_bits(n << 96 | n).into()).collect();
        let much =
            Bifurcation { addresses, udp_ports: (1..9).collect(), protocols: vec![4, 41, 47], later_fragments: true };
        for it in [nothing, much] {
            let program = load_program(ProgramKind::TcxIngress, "wirepath_test", &it, [7, 0]).unwrap();
            assert!(frames.iter().all(|(_, frame)| program.test_run(frame).unwrap() == 0));
        }
    }
}
