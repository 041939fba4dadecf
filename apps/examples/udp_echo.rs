//! Returns every UDP datagram to its sender, and drops all other packets.
//!
//!     cargo run --release --example udp_echo                            # on generated traffic
//!     cargo run --release --example udp_echo -- --config my-ports.toml  # on the ports of a file

use wirepath::prelude::*;

const GENERATED: &str = "[[port]]\nname = 'generator'\ndriver = 'null'\n[port.null]\nsource = 'udp4'\nflows = 100\n";

/// The stage: a function that is called for each batch of packets.
fn echo(context: &mut Context<'_>, batch: &mut Batch) {
    context.parse_each(batch, |context, mut packet, headers| {
        if return_to_sender(packet.headers_mut(headers)).is_none() {
            context.drop(packet, DropReason::RuleDrop);
            return None;
        }
        packet.set_out_port(packet.in_port());
        Some(packet)
    });
}

/// Swaps addresses and ports, which keeps all checksums valid. `None` if the packet is not UDP over IP.
fn return_to_sender(mut headers: HeadersMut<'_>) -> Option<()> {
    headers.udp()?.swap_ports();
    headers.ip()?.swap_addresses();
    headers.ethernet()?.swap_addresses();
    Some(())
}

fn main() -> ExitCode {
    wirepath::main(|| {
        let app = App::<()>::from_args("udp_echo", "Returns every UDP datagram to its sender.", GENERATED)?;
        app.run_stages(|_| echo)
    })
}
