//! Topologies of hosts around the machine under test.

use std::sync::Arc;
use std::time::Duration;

use wirepath_packet::Pool;
use wirepath_testlab::{FramePort, Lab, Namespace, Veth, oracle};

use crate::common;

/// Two hosts and a forwarding machine between them: `left eth0 -- west dut east -- eth0 right`.
pub(crate) struct Line {
    pub(crate) left: Arc<Namespace>,
    pub(crate) dut: Arc<Namespace>,
    pub(crate) right: Arc<Namespace>,
    _lab: Lab,
}

impl Line {
    pub(crate) fn new(name: &str, mtu: u32) -> Self {
        let lab = Lab::new(name);
        let [left, dut, right] = ["left", "dut", "right"].map(|name| Arc::new(lab.namespace(name)));
        Veth::new((&left, "eth0"), (&dut, "west")).mtu(mtu).plug();
        Veth::new((&right, "eth0"), (&dut, "east")).mtu(mtu).plug();
        for (host, number) in [(&left, 1), (&right, 2)] {
            host.ipv6("eth0");
            host.ip(&format!("addr add 192.0.2.{number}/24 dev eth0"));
            host.ip(&format!("addr add 2001:db8::{number}/64 dev eth0 nodad"));
        }
        Self { left, dut, right, _lab: lab }
    }
}

/// The machine under test and a peer: `dut eth0 -- eth0 peer`.
pub(crate) struct Pair {
    pub(crate) dut: Namespace,
    pub(crate) peer: Namespace,
    pub(crate) pool: Pool,
    _lab: Lab,
}

impl Pair {
    pub(crate) fn new(name: &str, mtu: u32, queues: u32) -> Self {
        let lab = Lab::new(name);
        let (dut, peer) = (lab.namespace("dut"), lab.namespace("peer"));
        Veth::new((&dut, "eth0"), (&peer, "eth0")).mtu(mtu).queues(queues).plug();
        Self { dut, peer, pool: common::pool(), _lab: lab }
    }
}

/// Frames that the kernel of the machine under test answers: an ARP request and a datagram to a closed port.
pub(crate) struct Requests(pub(crate) [Vec<u8>; 2]);

impl Requests {
    /// Configures the address 192.0.2.9 on the machine under test and returns requests to it.
    pub(crate) fn to(dut: &Namespace) -> Self {
        dut.ip("addr add 192.0.2.9/24 dev eth0");
        dut.ip("neigh add 192.0.2.1 lladdr 02:00:00:00:00:01 dev eth0 nud permanent");
        // Without this, the kernel limits the rate of ICMP messages.
        dut.sysctl("net.ipv4.icmp_ratelimit", "0");
        let mac = dut.mac("eth0").map(|byte| format!("{byte:02x}")).join(":");
        let script = format!(
            "ether = Ether(src='02:00:00:00:00:01')\n\
             arp = ARP(op=1, hwsrc='02:00:00:00:00:01', psrc='192.0.2.1', pdst='192.0.2.9')\n\
             ether.dst = 'ff:ff:ff:ff:ff:ff'\n\
             emit(ether/arp)\n\
             ether.dst = '{mac}'\n\
             emit(ether/IP(src='192.0.2.1', dst='192.0.2.9')/UDP(sport=1234, dport=9)/b'x')"
        );
        let frames = oracle::scapy::<Vec<u8>>(&[], &script).frames;
        Self(frames.try_into().expect("two requests"))
    }

    /// Sends the requests and returns which of them the kernel answers.
    pub(crate) fn answered(&self, wire: &mut FramePort) -> [bool; 2] {
        wire.drain();
        self.0.iter().for_each(|frame| wire.send(frame).unwrap());
        answers(wire)
    }
}

/// Returns whether an ARP reply and an ICMP message arrive before the wire is silent.
pub(crate) fn answers(wire: &mut FramePort) -> [bool; 2] {
    let mut answers = [false; 2];
    while let Some(frame) = wire.receive(Duration::from_millis(300)) {
        answers[0] |= frame.bytes[12..14] == [8, 6] && frame.bytes[21] == 2;
        answers[1] |= frame.bytes[12..14] == [8, 0] && frame.bytes[23] == 1;
    }
    answers
}
