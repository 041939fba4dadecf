//! Traffic of demonstrations. The driver `null` generates UDP datagrams only.

use wirepath::prelude::*;
use wirepath::wire::{IpProtocol, checksum::Transport, ipv4, tcp, tcp::flags, udp};

/// Port whose packets become replies.
const SERVER: PortId = PortId::new(1);

/// A stage that turns generated IPv4 datagrams into TCP SYNs. Those that port 1 receives become the SYN/ACKs of the
/// same connections. Frames must have no tags and at least 54 bytes.
pub(crate) fn handshakes(context: &mut Context<'_>, batch: &mut Batch) {
    context.parse_each(batch, |context, mut packet, headers| {
        let is_reply = packet.in_port() == Some(SERVER);
        if write(packet.data_mut(), headers, is_reply).is_none() {
            context.drop(packet, DropReason::RuleDrop);
            return None;
        }
        Some(packet)
    });
}

fn write(frame: &mut [u8], headers: &Parsed, is_reply: bool) -> Option<()> {
    let mut ip = ipv4::ViewMut::new(frame.get_mut(headers.outer().l3()..)?).ok()?;
    let ports = udp::View::new(ip.view().payload()).ok()?;
    let (src_port, dst_port) = (ports.src_port(), ports.dst_port());
    let syn = tcp::Repr { src_port, dst_port, seq: 1, ack: 0, flags: flags::SYN, window: 1024, urgent: 0 };
    let header = if is_reply {
        let (src, dst) = (ip.view().src(), ip.view().dst());
        ip.set_src(dst);
        ip.set_dst(src);
        tcp::Repr { src_port: dst_port, dst_port: src_port, ack: 2, flags: flags::SYN | flags::ACK, ..syn }
    } else {
        syn
    };
    ip.set_protocol(IpProtocol::TCP);
    ip.fill_checksum();
    header.emit(ip.payload_mut()).ok()?;
    let pseudo = ip.view().pseudo();
    Transport::Tcp.fill(ip.payload_mut(), pseudo).then_some(())
}
