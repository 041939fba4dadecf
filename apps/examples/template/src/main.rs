//! Joins two ports, and drops UDP datagrams to destination ports that the configuration does not list.

mod guard;

use wirepath::prelude::*;

use guard::{Guard, GuardSettings};

/// The configuration without `--config`: two generators.
const DEMONSTRATION: &str = include_str!("demonstration.toml");

fn main() -> ExitCode {
    wirepath::main(|| {
        let about = "Joins two ports, and drops UDP datagrams to ports that are not listed.";
        let app = App::<GuardSettings>::from_args("udp-guard", about, DEMONSTRATION)?;
        let guard = Guard::new(&app.own.udp_ports)?;
        // Each worker gets a stage of its own.
        app.run_stages(move |_| guard.clone())
    })
}
