//! `wirepath ndr`: finds the throughput of a device.

use std::str::FromStr;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::{Value, json};
use wirepath::cli::{self, Failure, Stop, print, print_error, print_json};

use super::generator::{GeneratorArguments, StreamArguments};
use crate::ndr::qualify::{Qualification, problems_json, problems_text};
use crate::ndr::report::{Report, brief};
use crate::ndr::search::{Goal, Search};
use crate::ndr::{End, Measurement, Plan, TrialRecord, measure};
use crate::pktgen::flows::Traffic;
use crate::pktgen::rate::Rate;
use crate::pktgen::size::Sizes;
use crate::pktgen::{Generator, Limit, Trial};

/// Loss ratios without `--loss-ratio`: NDR and PDR.
const LOSS_RATIOS: [f64; 2] = [0.0, 0.005];
/// Lowest load without `--min-rate`, as a share of the highest one.
const MIN_SHARE: f64 = 0.001;
/// Packets that a trial at the default lowest load has at least.
const MIN_PACKETS: f64 = 10.0;
/// Interval between lines that show the progress.
const PROGRESS: Duration = Duration::from_secs(1);

/// Finds the highest load at which a device loses at most a given share of the packets
///
/// It is a multiple loss ratio search (MLRsearch, RFC 9971): trials of growing duration narrow an interval of loads for
/// each loss ratio, until it is as narrow as asked. Packets that arrive twice, out of order, changed or at the wrong
/// port do not count as received. Before the search the tool checks that the machine leaves its processors alone. If it
/// does not, or if it disturbs a trial again and again, the tool prints the cause and the remedy in place of figures.
/// With --json: an object with `searches`, `machine`, `ports`, `noise` and `disturbed`.
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub struct Options {
    #[command(flatten)]
    generator: GeneratorArguments,

    #[command(flatten)]
    streams: StreamArguments,

    /// Length of the frames in bytes, with the frame check sequence; each --size is a search [default: 64]
    ///
    /// Several lengths in one search: 64,512,1518, or with weights 64:7,570:4,1518:1, which is also called imix.
    #[arg(long, value_name = "SIZES")]
    size: Vec<NamedSizes>,

    /// Highest loss ratio of a good trial; each --loss-ratio is a goal [default: 0 and 0.5%]
    #[arg(long, value_name = "RATIO")]
    loss_ratio: Vec<Ratio>,

    /// Highest share of bad trials at a load that passes
    #[arg(long, value_name = "RATIO", default_value = "50%")]
    exceed_ratio: Ratio,

    /// Precision: distance of the load that passes from the one that fails, relative to the latter
    #[arg(long, value_name = "RATIO", default_value = "0.5%")]
    width: Ratio,

    /// Duration of the first trials in seconds
    #[arg(long, value_name = "N", default_value = "1", value_parser = cli::seconds)]
    initial_seconds: Duration,

    /// Duration of the trials that decide, in seconds
    #[arg(long, value_name = "N", default_value = "1", value_parser = cli::seconds)]
    final_seconds: Duration,

    /// Sum of the durations of the trials that decide about a load, in seconds
    #[arg(long, value_name = "N", default_value = "21", value_parser = cli::seconds)]
    duration_sum: Duration,

    /// Highest load of each sending port, in the forms of `wirepath pktgen --rate` [default: the speed of the link]
    #[arg(long, value_name = "RATE")]
    max_rate: Option<Rate>,

    /// Lowest load of each sending port [default: a thousandth of the highest one, and 10 packets in a trial]
    #[arg(long, value_name = "RATE")]
    min_rate: Option<Rate>,

    /// Duration of the trials that measure the latency at 10, 50 and 90 % of the throughput without loss, in seconds
    /// [default: that of --final-seconds]
    #[arg(long, value_name = "N", value_parser = cli::seconds)]
    latency_seconds: Option<Duration>,

    /// Do not measure the latency
    #[arg(long, conflicts_with = "latency_seconds")]
    no_latency: bool,

    /// Time of each search in seconds, after which the bounds so far are printed
    #[arg(long, value_name = "N", default_value = "1200", value_parser = cli::seconds)]
    time_limit: Duration,

    /// Time for which the processors are observed before the search, in seconds
    #[arg(long, value_name = "N", default_value = "1", value_parser = cli::seconds)]
    qualify_seconds: Duration,

    /// Print figures although the machine disturbs them, marked as disturbed
    #[arg(long)]
    allow_noise: bool,
}

const HELP: &str = "\
Goals of others:
  RFC 2544 throughput           --loss-ratio 0 --exceed-ratio 0 --final-seconds 60 --duration-sum 60
  FD.io CSIT NDR and PDR        the defaults

Examples:
  wirepath ndr --tx eth1 --rx eth2
                            NDR and PDR through a device between two ports, up to the speed of the link
  wirepath ndr --tx eth1 --rx eth2 --threads 2 --cores 2,3 --size 64 --size 512 --size 1518
                            one search for each size, on isolated processors
  wirepath ndr --port eth1 --max-rate 2Mpps --loss-ratio 0 --width 1% --json
                            with a reflector at the other end (`wirepath pktgen reflect`)

Exit code: 0 if the search ended or was stopped by Ctrl-C; 1 if a port failed or the machine disturbs the measurement;
2 for a request that is not possible on these ports.";

/// Sizes with the text that names them.
#[derive(Clone, Debug)]
struct NamedSizes {
    text: String,
    sizes: Sizes,
}

impl FromStr for NamedSizes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Ok(Self { text: text.to_owned(), sizes: text.parse()? })
    }
}

/// A ratio, as a number or in percent.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Ratio(f64);

impl FromStr for Ratio {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (number, scale) = text.strip_suffix('%').map_or((text, 1.0), |number| (number, 100.0));
        match number.trim().parse::<f64>() {
            Ok(value) if (0.0..1.0).contains(&(value / scale)) => Ok(Self(value / scale)),
            _ => Err(format!("found \"{text}\", expected a ratio from 0 to below 1 such as 0.005, or 0.5%")),
        }
    }
}

impl Options {
    fn goals(&self) -> Result<Vec<Goal>, Failure> {
        let given: Vec<f64> = self.loss_ratio.iter().map(|ratio| ratio.0).collect();
        let ratios = if given.is_empty() { LOSS_RATIOS.to_vec() } else { given };
        if let Some(twice) = ratios.iter().zip(1..).find(|(ratio, next)| ratios[*next..].contains(ratio)) {
            return Err(Failure::usage(format!("--loss-ratio {} is given twice", twice.0)));
        }
        let goal = |loss_ratio: &f64| Goal {
            loss_ratio: *loss_ratio,
            exceed_ratio: self.exceed_ratio.0,
            width: self.width.0,
            initial_duration: self.initial_seconds,
            final_duration: self.final_seconds,
            duration_sum: self.duration_sum,
        };
        let goals: Vec<Goal> = ratios.iter().map(goal).collect();
        goals.iter().try_for_each(Goal::check).map_err(Failure::usage)?;
        Ok(goals)
    }

    /// Returns the searches, one for each size, after a check that the ports can make them.
    fn plans(&self, generator: &Generator, goals: &[Goal]) -> Result<Vec<(NamedSizes, Plan)>, Failure> {
        let default = [NamedSizes { text: "64".to_owned(), sizes: Sizes::Round(vec![64]) }];
        let sizes = if self.size.is_empty() { &default[..] } else { &self.size };
        let mut plans = Vec::new();
        for named in sizes {
            let traffic = self.streams.flows(named.sizes.clone())?;
            let load = |rate: Rate| -> Result<f64, Failure> {
                let traffic = Traffic::Flows(traffic.clone());
                let trial = Trial {
                    traffic,
                    rate: Some(rate),
                    limit: Limit::None,
                    drain: self.generator.drain,
                    reorder_threshold: None,
                };
                let no_number = || Failure::usage("a limit of the load must be a number, not \"max\"");
                generator.packets_per_second(&trial)?.ok_or_else(no_number)
            };
            // Sizes that are not possible are no fault of the rate.
            load(Rate::Packets(1.0))?;
            let max = match self.max_rate {
                Some(rate) => load(rate)?,
                None => load(Rate::Share(1.0))
                    .map_err(|error| Failure::usage(format!("{error}; --max-rate sets the highest load")))?,
            };
            let initial = self.initial_seconds.as_secs_f64();
            let min = match self.min_rate {
                Some(rate) => load(rate)?,
                None => (max * MIN_SHARE).max(MIN_PACKETS / initial),
            };
            if min >= max {
                return Err(Failure::usage(format!(
                    "the lowest load of {min:.1} pps is not below the highest one of {max:.1} pps; see --min-rate and \
                     --max-rate"
                )));
            }
            if min * initial < 1.0 {
                return Err(Failure::usage(format!(
                    "a trial of {initial} s at the lowest load of {min} pps has no packet; at least {} pps are needed",
                    1.0 / initial
                )));
            }
            let plan = Plan {
                traffic,
                goals: goals.to_vec(),
                limits: (min, max),
                drain: self.generator.drain,
                time_limit: self.time_limit,
                latency: (!self.no_latency).then(|| self.latency_seconds.unwrap_or(self.final_seconds)),
                allow_noise: self.allow_noise,
            };
            plans.push((named.clone(), plan));
        }
        Ok(plans)
    }
}

/// Shows the trials on standard error, about one each second.
fn progress(size: &str) -> impl FnMut(&[TrialRecord], &Search) {
    let mut shown = Instant::now();
    move |trials, search| {
        let Some(trial) = trials.last().filter(|_| shown.elapsed() >= PROGRESS) else { return };
        shown = Instant::now();
        print_error(&format!(
            "size {size}: trial {}, {} s at {:.0} pps: {:.4} % lost{}; {}\n",
            trials.len(),
            trial.request.duration.as_secs_f64(),
            trial.request.load,
            trial.loss_ratio() * 100.0,
            if trial.problems.is_empty() { "" } else { " (disturbed)" },
            brief(&search.results())
        ));
    }
}

/// Runs the subcommand.
///
/// # Errors
/// If the request is not possible, a port fails, or the machine disturbs the measurement.
pub fn run(options: &Options, json: bool) -> Result<(), Failure> {
    let goals = options.goals()?;
    let arguments = &options.generator;
    let ports = arguments.roles()?;
    if !ports.iter().any(|(_, role)| role.receives) {
        return Err(Failure::usage("no port receives; give --rx PORT or --port PORT, see --help"));
    }
    let stop = Stop::on_signals()?;
    let mut generator = arguments.open(&ports)?;
    let plans = options.plans(&generator, &goals)?;
    let described = generator.describe();
    if !json {
        let mut text: String = described.iter().map(|(name, text)| format!("port {name}: {text}\n")).collect();
        text.extend(generator.notes().iter().map(|note| format!("note: {note}\n")));
        print(text)?;
    }

    let flag = stop.flag();
    let machine = Qualification::measure(arguments.threads, &arguments.cores, options.qualify_seconds, &flag)?;
    let noise = machine.problems();
    let is_refused = !noise.is_empty() && !options.allow_noise;
    if !json {
        print(machine.text() + &problems_text(&noise))?;
    }
    let mut found: Vec<(NamedSizes, Measurement)> = Vec::new();
    for (size, plan) in plans {
        if is_refused || flag.load(Ordering::Relaxed) {
            break;
        }
        let measurement = measure(&mut generator, &plan, &machine, &flag, progress(&size.text))?;
        if !json {
            print(report(&size, &measurement, !noise.is_empty()).text())?;
        }
        let is_last = matches!(measurement.end, End::Failed(_) | End::Stopped | End::Noise(_));
        found.push((size, measurement));
        if is_last {
            break;
        }
    }
    let closed = generator.close();
    if json {
        let ports: Vec<Value> = described.iter().map(|(name, text)| json!({ "name": name, "mode": text })).collect();
        let reports = || found.iter().map(|(size, measurement)| report(size, measurement, !noise.is_empty()));
        print_json(&json!({
            "searches": reports().map(|report| report.to_json()).collect::<Vec<Value>>(),
            "machine": machine.to_json(),
            "ports": ports,
            "noise": problems_json(&noise),
            "disturbed": !noise.is_empty() || reports().any(|report| report.is_disturbed()),
        }))?;
    }
    match found.pop().map(|(_, measurement)| measurement.end) {
        Some(End::Failed(why)) => return Err(Failure::failed(why)),
        Some(End::Noise(_)) => return Err(noisy()),
        _ if is_refused => return Err(noisy()),
        _ => {}
    }
    if let Err(error) = closed {
        print_error(&format!("{error}\n"));
    }
    Ok(())
}

fn noisy() -> Failure {
    Failure::failed(
        "the machine disturbs the measurement, so there are no figures; with --allow-noise they are printed and marked",
    )
}

fn report<'a>(size: &'a NamedSizes, measurement: &'a Measurement, is_noisy: bool) -> Report<'a> {
    Report { size: &size.text, mean: size.sizes.mean(), measurement, is_noisy }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_numbers_or_percent() {
        let read = |text: &str| text.parse::<Ratio>();
        assert_eq!(read("0.5%"), Ok(Ratio(0.005)));
        assert_eq!(read("0.005"), Ok(Ratio(0.005)));
        assert_eq!(read("0"), Ok(Ratio(0.0)));
        for text in ["1", "100%", "-1%", "nan", "", "%", "half"] {
            assert!(read(text).unwrap_err().contains("expected a ratio from 0 to below 1"), "{text}");
        }
    }
}
