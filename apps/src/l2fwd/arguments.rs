use clap::Parser;

use wirepath::{AppArguments, cli};

/// Forwards Ethernet frames between ports.
///
/// Without --config a demonstration runs for ten seconds: two ports generate frames and discard the frames
/// that they send. It needs no privileges.
#[derive(Debug, Parser)]
#[command(name = "l2fwd", version, term_width = cli::HELP_WIDTH, after_help = AFTER_HELP)]
pub struct Arguments {
    /// Options of every packet program.
    #[command(flatten)]
    pub app: AppArguments,
}

const AFTER_HELP: &str = r#"Example configuration:
  [[port]]
  name = "left"             # its name in the rest of the file
  driver = "auto"           # or af_xdp, af_packet, tap, pcap, memory, null; see `wirepath devices`
  device = "eth1"

  [[port]]
  name = "right"
  device = "eth2"

  [l2fwd]
  mode = "pairs"            # or "bridge": learns addresses, joins all ports
  pairs = [["left", "right"]]
  rewrite_mac = false       # pairs: frames get the port's address as source
  # ageing = 300            # bridge: seconds until an address is forgotten

  [[rule]]                  # any number; see `wirepath flow items` and `wirepath flow actions`
  rule = "ingress prio 10: port id left / ipv4 dst 10.0.0.0/8 / tcp dst 23 => count, drop"

  [rules]
  file = "acl.rules"        # more rules, one per line; reloaded on SIGHUP

  [workers]
  cores = [1]               # one worker pinned to each core; default: one, not pinned
  idle = "adaptive"         # or "busy"

More examples are in configs/l2fwd-*.toml. SIGINT or SIGTERM stops cleanly.
Exit code: 0 success, 1 failure, 2 invalid usage or configuration."#;
