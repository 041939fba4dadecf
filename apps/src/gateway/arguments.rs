use std::path::PathBuf;

use clap::Parser;

use super::EXAMPLE;
use wirepath::cli;

/// Joins local segments (a port, or a VLAN on a port) to VXLAN segments over IPv4 and IPv6.
///
/// Without --config a demonstration runs, which needs no privileges and no interfaces: a traffic source, the
/// gateway, and a remote VTEP behind an in-memory cable that returns every frame. It stops after ten seconds,
/// or after the time of --seconds.
///
/// With --config FILE the gateway runs on the ports of that file until Ctrl-C or the end of --seconds. It
/// resolves its next hops by ARP and neighbour discovery. It answers for its addresses, which must not be
/// configured in the kernel. It learns which hosts are behind each remote, and replicates broadcast,
/// multicast and unknown unicast frames to all remotes of a segment.
#[derive(Debug, Parser)]
#[command(name = "tunnel-gateway", version, term_width = cli::HELP_WIDTH, after_long_help = after_help())]
pub struct Arguments {
    /// Configuration and length of the run.
    #[command(flatten)]
    pub run: cli::RunArguments,

    /// Write dropped packets to this pcapng file, each with its drop reason as a comment
    #[arg(long, value_name = "FILE")]
    pub capture_drops: Option<PathBuf>,

    /// Options of every program.
    #[command(flatten)]
    pub common: cli::Common,
}

fn after_help() -> String {
    let indented: String = EXAMPLE.lines().map(|line| format!("    {line}\n")).collect();
    format!(
        "Example configuration:\n\n{indented}\n\
         Flow rules run before and after the gateway ([[rule]] tables, or [rules] file = \"FILE\", reloaded on\n\
         SIGHUP):\n\n    [[rule]]\n    \
         rule = \"ingress prio 1: port id wan / udp / vxlan vni 42 / ipv4 => count, drop\"\n\n\
         See `wirepath flow items` and `wirepath flow actions`. More examples are in configs/ of the source tree.\n\n\
         Exit codes: 0 success, 1 failure, 2 invalid usage or configuration (nothing was started).\n\n\
         Examples:\n    tunnel-gateway                                  # the demonstration\n    \
         tunnel-gateway --config gateway.toml --check\n    \
         tunnel-gateway --config gateway.toml --seconds 60 --json"
    )
}
