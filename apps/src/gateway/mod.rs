//! The program `tunnel-gateway`: configuration, operation and demonstration.

mod arguments;
pub mod demo;
mod evpn;
mod exchange;
mod kernel_underlay;
mod objects;
mod offload;
mod reconfigure;
mod report;
mod rules;
mod setup;
mod state;

pub use arguments::Arguments;
pub use evpn::DEVICE_ALIAS;
#[cfg(fuzzing)]
pub use evpn::sequences as mirror_sequences;
pub use offload::{NicTunnels, report_nic_tunnels, update_nic_tunnels};
pub use report::{GatewayMonitor, Report};
pub use rules::{GatewayRule, Hop, PRIORITY, decap_rules, encap_headers, gateway_rules};
pub use setup::{EXAMPLE, Setup, TABLES, check_opened, check_tags, rule_parser, warn_of_lost_tags};
pub use state::{STATE, StateSettings};
