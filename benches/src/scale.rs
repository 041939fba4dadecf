//! Cost by size: how a figure grows with cores, queues, flows, rules, tunnels or routes.

use clap::{Parser, ValueEnum};
use serde::Serialize;
use wirepath::cli::{Failure, Rate};

use crate::measure::{self, Results, measured};
use crate::{forward, router, rules, tunnel};

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Quantity that grows
    #[arg(value_enum)]
    what: What,

    /// Values of the quantity; the first one is the base of the ratios [default: some powers of ten, or of two]
    #[arg(long, value_name = "N,...", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..))]
    values: Vec<u32>,

    /// Options of the command that is measured, such as `-- --kind geneve --seconds 1`
    #[arg(last = true, value_name = "OPTIONS")]
    options: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
enum What {
    /// Workers that forward, each with a core and queues of its own (`forward --workers`)
    Cores,
    /// Queues that one worker polls (`forward --queues`)
    Queues,
    /// Flows to hosts behind a tunnel (`tunnel --flows`)
    Flows,
    /// Remotes of a segment, each with a tunnel (`tunnel --remotes`)
    Tunnels,
    /// Segments, each with a tunnel and a VLAN (`tunnel --segments`)
    Segments,
    /// Routes, each with a flow (`router --destinations`)
    Routes,
    /// Rules with twenty masks (`rules --rules`)
    Rules,
}

impl What {
    /// Returns the command that is measured, with its option for the quantity.
    fn command(self) -> (&'static str, &'static str) {
        match self {
            Self::Cores => ("forward", "--workers"),
            Self::Queues => ("forward", "--queues"),
            Self::Flows => ("tunnel", "--flows"),
            Self::Tunnels => ("tunnel", "--remotes"),
            Self::Segments => ("tunnel", "--segments"),
            Self::Routes => ("router", "--destinations"),
            Self::Rules => ("rules", "--rules"),
        }
    }

    fn default_values(self) -> Vec<u32> {
        match self {
            Self::Cores => {
                let cores = std::thread::available_parallelism().map_or(1, |n| n.get() as u32);
                (0..).map(|power| 1 << power).take_while(|n| *n <= cores).collect()
            }
            Self::Queues => vec![1, 2, 4, 8, 16, 32, 64],
            Self::Flows => vec![1, 100, 10_000, 1_000_000],
            Self::Tunnels => vec![1, 10, 100, 1000, 10_000],
            Self::Segments => vec![1, 10, 100, 1000],
            Self::Routes => vec![1, 100, 10_000, 100_000],
            Self::Rules => vec![1, 100, 10_000, 100_000],
        }
    }

    /// Returns the command line for a value.
    fn arguments(self, value: u32, options: &[String]) -> Vec<String> {
        let (command, option) = self.command();
        let mut all = vec![command.to_owned(), option.to_owned(), value.to_string()];
        // Each tunnel needs a flow of its own, and all values the same number of flows.
        if matches!(self, Self::Tunnels | Self::Segments) && !options.iter().any(|it| it.starts_with("--flows")) {
            all.extend(["--flows".to_owned(), "10000".to_owned()]);
        }
        all.extend_from_slice(options);
        all
    }
}

/// A command that can be measured.
#[derive(Parser)]
#[command(name = "wirepath-bench scale", no_binary_name = true)]
enum Measured {
    Forward(forward::Arguments),
    Tunnel(tunnel::Arguments),
    Router(router::Arguments),
    Rules(rules::Arguments),
}

/// Figures at one value.
#[derive(Clone, Debug, Serialize)]
struct Point {
    value: u32,
    /// Cycles per packet in the time in which the workers had their cores, of all workers together.
    cycles_per_packet: f64,
    /// Range of the rounds as a fraction of their median.
    spread: f64,
    /// Packets per second; of rules, it is not measured.
    pps: Option<f64>,
    cpu_share: Option<f64>,
    /// Ratio to the first value: packets per second for cores, otherwise cycles per packet.
    ratio: f64,
}

/// Figures by value.
#[derive(Debug, Serialize)]
pub(crate) struct Figures {
    what: What,
    /// Command line of the last value.
    command: String,
    points: Vec<Point>,
}

impl Results for Figures {
    fn text(&self) -> String {
        let what = self.what.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned());
        let name = if self.what == What::Cores { "speed-up" } else { "ratio" };
        let mut text = format!("{what:>10}  cycles/packet  spread  packets/s  {name}\n");
        for point in &self.points {
            text += &format!(
                "{:>10}  {:>13.1}  {:>5.1}%  {:>9}  {:.2}\n",
                point.value,
                point.cycles_per_packet,
                100.0 * point.spread,
                point.pps.map_or_else(String::new, |pps| Rate(pps).to_string()),
                point.ratio
            );
        }
        text + &format!("command: wirepath-bench {}\n", self.command)
    }

    fn cpu_share(&self) -> Option<f64> {
        self.points.iter().filter_map(|point| point.cpu_share).reduce(f64::min)
    }

    fn spread(&self) -> Option<f64> {
        self.points.iter().map(|point| point.spread).reduce(f64::max)
    }
}

/// Measures a command line.
fn point(value: u32, arguments: &[String]) -> Result<Point, Failure> {
    let command = Measured::try_parse_from(arguments).map_err(|error| Failure::usage(error.render()))?;
    let of_packets = |figures: measure::Figures| Point {
        value,
        cycles_per_packet: figures.own_cycles_per_packet,
        spread: figures.cycles.spread,
        pps: Some(figures.pps),
        cpu_share: Some(figures.cpu_share),
        ratio: 1.0,
    };
    Ok(match command {
        Measured::Forward(arguments) => of_packets(measured(forward::run(&arguments)?)?),
        Measured::Tunnel(arguments) => of_packets(measured(tunnel::run(&arguments)?)?),
        Measured::Router(arguments) => of_packets(measured(router::run(&arguments)?)?),
        Measured::Rules(arguments) => {
            let figures = rules::run(&arguments)?;
            let spread = figures.spread().unwrap_or(0.0);
            Point { value, cycles_per_packet: figures.cycles(), spread, pps: None, cpu_share: None, ratio: 1.0 }
        }
    })
}

pub(crate) fn run(arguments: &Arguments) -> Result<Figures, Failure> {
    let what = arguments.what;
    let values = if arguments.values.is_empty() { what.default_values() } else { arguments.values.clone() };
    let mut figures = Figures { what, command: String::new(), points: Vec::new() };
    for value in values {
        let line = what.arguments(value, &arguments.options);
        let mut point = point(value, &line)?;
        figures.command = line.join(" ");
        let first = figures.points.first().unwrap_or(&point);
        point.ratio = match (what, first.pps, point.pps) {
            (What::Cores, Some(first), Some(pps)) => pps / first,
            _ => point.cycles_per_packet / first.cycles_per_packet,
        };
        tracing::info!("{value}: {:.1} cycles/packet", point.cycles_per_packet);
        figures.points.push(point);
    }
    Ok(figures)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_quantity_has_a_command_that_takes_its_values() {
        for what in What::value_variants() {
            for value in what.default_values() {
                let line = what.arguments(value, &["--seconds".to_owned(), "1".to_owned()]);
                assert!(Measured::try_parse_from(&line).is_ok(), "{line:?}");
            }
        }
        let own = ["--flows=7".to_owned()];
        assert!(Measured::try_parse_from(What::Tunnels.arguments(3, &own)).is_ok());
        assert!(Measured::try_parse_from(What::Flows.arguments(3, &own)).is_err(), "the option twice");
    }

    #[test]
    fn ratios_are_those_to_the_first_value() {
        let quick = ["--seconds", "0.02", "--rounds", "1", "--warm-up", "0"].map(str::to_owned).to_vec();
        let figures = run(&Arguments { what: What::Queues, values: vec![1, 2], options: quick }).unwrap();
        let [first, second] = &figures.points[..] else { panic!("{figures:?}") };
        assert_eq!((first.ratio, second.value), (1.0, 2));
        assert!((second.ratio - second.cycles_per_packet / first.cycles_per_packet).abs() < 1e-9);
        let text = figures.text();
        assert!(text.ends_with("command: wirepath-bench forward --queues 2 --seconds 0.02 --rounds 1 --warm-up 0\n"));
    }
}
