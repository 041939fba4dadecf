//! The program `l2fwd`: joins ports in pairs or bridges all ports.
//!
//! Configuration in addition to `[[port]]`, `[workers]` and `[pool]`:
//!
//! ```toml
//! [l2fwd]
//! mode = "pairs"              # or "bridge"
//! pairs = [["east", "west"]]  # mode "pairs"; default: the ports two by two, in order
//! rewrite_mac = false         # mode "pairs": frames leave with the port's address as source
//! ageing = 300                # mode "bridge": seconds until an address that was not seen is forgotten; 0: never
//! ```
//!
//! Flow rules (`[[rule]]`, `[rules]`; [`wirepath::rules`]) run around the forwarding: ingress rules before it
//! and egress rules after it.

mod arguments;
mod bridge;
mod config;
mod pairs;

pub use arguments::Arguments;
pub use bridge::{Bridge, BridgeControl};
pub use config::Mode;
pub use pairs::{Pairs, PairsControl};
use wirepath::{App, Failure};

/// Configuration of the built-in demonstration: two ports that generate frames and discard the frames that
/// they send.
pub const DEMONSTRATION: &str = r#"
[[port]]
name = "east"
driver = "null"
[port.null]
source = "udp4"
flows = 1000

[[port]]
name = "west"
driver = "null"
[port.null]
source = "udp4"
flows = 1000

[l2fwd]
mode = "pairs"
rewrite_mac = true
"#;

/// Runs the program.
///
/// # Errors
/// If the configuration has mistakes, ports or the control socket cannot be opened, or the rules cannot be carried out.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let app = App::<Mode>::start("l2fwd", &arguments.app, DEMONSTRATION)?;
    let done = match app.own {
        Mode::Pairs { ref peers, rewrite_mac } => {
            let peers = peers.clone();
            app.run(move |runtime, _| {
                let stage = Pairs::new(&peers, rewrite_mac.then(|| runtime.ports()));
                let control = stage.control();
                Ok((move |_: &_| stage.clone(), control))
            })
        }
        Mode::Bridge { ageing } => app.run(move |runtime, _| {
            let (bridge, control) = Bridge::new(runtime.domain(), runtime.ports(), ageing);
            Ok((move |_: &_| bridge.clone(), control))
        }),
    };
    done.map(|_summary| ())
}
