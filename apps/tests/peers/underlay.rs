use std::net::IpAddr;
use std::time::Duration;

use wirepath_testlab::oracle;

use crate::world::{Variant, WAIT_LIMIT, World, remote_address};

/// The gateway answers for its VTEP address once, with the port's link-layer address. The kernel below it,
/// which does not have the address, does not answer and does not respond to tunnel packets.
pub(crate) fn answers_for_its_address_alone(variant: Variant) {
    let world = World::new(variant, 1, 1, 1500);
    let mut gateway = world.start();
    let remote = &world.remotes[0];
    let mut wire = remote.frames("eth0");
    world.wait_for(&mut gateway, &world.hosts[0], &remote_address(0));
    let mac = world.gateway.mac("wan");
    let frames = wire.drain();
    for frame in &frames {
        // ICMP type 3 (IPv4) or ICMPv6 type 1 from the gateway's machine: "port unreachable" for a tunnel
        // packet.
        let unreachable = match variant.vtep() {
            IpAddr::V4(_) => frame.bytes[12..14] == [8, 0] && frame.bytes[23] == 1 && frame.bytes[34] == 3,
            IpAddr::V6(_) => frame.bytes[12..14] == [0x86, 0xdd] && frame.bytes[20] == 58 && frame.bytes[54] == 1,
        };
        assert!(!unreachable, "the kernel answers tunnel packets: {:02x?}", frame.bytes);
    }
    // The request comes from an otherwise unused host address.
    let none: [&[u8]; 0] = [];
    let vtep = variant.vtep();
    let question = match vtep {
        IpAddr::V4(_) => format!(
            "emit(Ether(src='02:00:00:00:55:01', dst='ff:ff:ff:ff:ff:ff')/ARP(op=1, hwsrc='02:00:00:00:55:01', \
            psrc='10.9.0.200', pdst='{vtep}'))"
        ),
        IpAddr::V6(_) => format!(
            "
sol = in6_getnsma(inet_pton(socket.AF_INET6, '{vtep}'))
mac = in6_getnsmac(sol)
emit(Ether(src='02:00:00:00:55:01', dst=mac)/IPv6(src='fd00:9::200', dst=inet_ntop(socket.AF_INET6, sol), hlim=255)\
/ICMPv6ND_NS(tgt='{vtep}')/ICMPv6NDOptSrcLLAddr(lladdr='02:00:00:00:55:01'))"
        ),
    };
    let question = oracle::scapy(&none, &question).frames.remove(0);
    let mut padded = question;
    padded.resize(padded.len().max(60), 0);
    wire.send(&padded).expect("sent");
    let ours = |frame: &wirepath_testlab::Frame| frame.bytes[..6] == [2, 0, 0, 0, 0x55, 1];
    let answer = wire.receive_where(WAIT_LIMIT, ours).expect("an answer").bytes;
    assert!(wire.receive_where(Duration::from_millis(500), ours).is_none(), "a second answer");
    oracle::assert_clean(&[&answer]);
    assert_eq!(answer[6..12], mac);
    let text = match vtep {
        IpAddr::V4(_) => "p = Ether(frames[0]); print(p[ARP].op, p[ARP].psrc, p[ARP].hwsrc)",
        IpAddr::V6(_) => {
            "p = Ether(frames[0]); print(p[ICMPv6ND_NA].type, p[ICMPv6ND_NA].tgt, p[ICMPv6NDOptDstLLAddr].lladdr)"
        }
    };
    let kind = if variant.ipv6 { 136 } else { 2 };
    let mac: Vec<String> = mac.iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(oracle::scapy(&[&answer], text).lines, [format!("{kind} {vtep} {}", mac.join(":"))]);
    gateway.stop();
}
