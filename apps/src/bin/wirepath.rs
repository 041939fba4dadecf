//! What this machine offers to the packet programs, and what stands in their way.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use wirepath_apps::cli;
use wirepath_apps::tools::flow::FlowCommand;
use wirepath_apps::tools::{attach, devices, doctor, emulate, flow};

/// Says what this machine offers to Wirepath's packet programs.
#[derive(Debug, Parser)]
#[command(name = "wirepath", version, after_help = AFTER_HELP)]
struct Arguments {
    #[command(subcommand)]
    command: Command,

    #[command(flatten)]
    common: cli::Common,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Lists the ports that could be used: by which driver, in which mode, and why not
    ///
    /// Nothing is opened for traffic and nothing is changed. An interface appears once for each driver, the best one first: that is
    /// the one `driver = "auto"` takes, unless the interface carries the default route. With --json: an object with `devices`
    /// (device, driver, usable, and mode or reason) and `drivers` (driver, about).
    Devices {
        /// Instead, open this device and print what its hardware for flow rules can do, as JSON that `flow explain --capabilities` reads
        #[arg(long, value_name = "DRIVER:DEVICE")]
        rules: Option<String>,
    },

    /// Looks for what stands in the way, and names the command that mends it
    ///
    /// OK: as it should be. WARN: works, but slower or with fewer drivers. FAIL: ports on network interfaces will not work. The exit
    /// code is 1 if anything FAILs, else 0. The line behind `>` is the command that mends it. With --json: an object with `ok` and
    /// `findings` (check, level, found, remedy).
    Doctor,

    /// Looks at a port of a running program, or works with queues of it in this process
    ///
    /// The program offers the port with `attach = SOCKET` in the table of its `mlx5` or `mana` port and `shared = true` in the table `pool`. Alone:
    /// its queues and pool, counted. With --transmit or --receive queues of the NIC are made for this process, which maps them, the packets
    /// and the doorbells, and works without the program; they end with this process, however that ends. A receive queue takes its share of
    /// what arrives. With --json: an object with `port`, and `done` if there was something to do.
    Attach(attach::Options),

    /// Flow rules: checks them, says where they run and what they do with a capture, and explains the language
    #[command(subcommand)]
    Flow(FlowCommand),

    /// Runs any program on emulated NICs, under the libraries of rdma-core as they are installed
    ///
    /// The program finds the RDMA devices of the topology file, with ports joined by cables or to TAP devices, interfaces and files. What
    /// a real NIC would refuse is refused, and the file's `log` (standard error if it names none) says why. The exit code is the
    /// program's; 128 and the number of the signal that ended it.
    Emulate {
        /// File of devices, ports, links and faults; configs/ has examples
        #[arg(long, value_name = "FILE")]
        topology: PathBuf,

        /// How doorbells are seen, whatever the file says: trap loses none, queue hands them to a thread, scan is fast
        #[arg(long, value_parser = ["trap", "queue", "scan"])]
        doorbells: Option<String>,

        /// Asks a program that runs already, through the file's `control` socket: "counters", or a fault such as "kind = 'port-down'"
        #[arg(long, value_name = "REQUEST", conflicts_with = "program")]
        ask: Option<String>,

        /// The program and its arguments
        #[arg(last = true, required_unless_present = "ask")]
        program: Vec<OsString>,
    },
}

const AFTER_HELP: &str = "\
Examples:
  wirepath doctor            can this machine run real ports?
  wirepath devices           what to write as `device` and `driver` in a configuration
  wirepath devices --json    the same for programs
  wirepath attach SOCKET     how is the port of a running program?
  wirepath flow check FILE   are these flow rules right, and does each of them run?
  wirepath flow explain CONF where would each rule run, and why there?
  wirepath flow match CONF --pcap FILE
                             which rule does each packet meet, and what becomes of it?
  wirepath flow items        what patterns are made of
  wirepath emulate --topology configs/emulated-nics.toml -- ibv_devinfo -v

Exit code: 0 done, 1 failed (doctor: something FAILs), 2 bad usage.";

fn main() -> ExitCode {
    // No processor check here: to tell what the processor lacks is the doctor's work.
    cli::main_unchecked(|| {
        let arguments = Arguments::parse();
        arguments.common.start_logging();
        match arguments.command {
            Command::Devices { rules: Some(device) } => devices::rules(&device),
            Command::Devices { rules: None } => devices::run(arguments.common.json),
            Command::Doctor => doctor::run(arguments.common.json),
            Command::Attach(options) => attach::run(&options, arguments.common.json),
            Command::Flow(command) => flow::run(&command, arguments.common.json),
            Command::Emulate { topology, ask: Some(request), .. } => emulate::ask(&topology, &request),
            Command::Emulate { topology, doorbells, program, .. } => {
                emulate::run(&topology, doorbells.as_deref(), &program)
            }
        }
    })
}
