//! `wirepath selftest`: tests a port with real frames, feature by feature.

mod bench;
mod checks;
mod frames;
mod rules;

use std::process::Command;

use clap::Args;
use serde::Serialize;

use self::bench::{Bench, PortName, Wiring};
use wirepath::cli::{Failure, Table, print, print_json};

/// Receive queues of the RSS test.
const QUEUES: u16 = 4;

/// Tests a port with real frames: lengths, checksums, VLAN, TSO, RSS, modes, rules, restart
///
/// Frames that the port sends must come back to it, through a loop-back plug or a loop in the switch. With
/// --peer they must arrive at that port, through a cable. The test takes the ports from the kernel while it runs. Each
/// feature passes, fails with the first counter-example, or is skipped with the reason. With --json: an
/// object with `ports`, `passed` and `results` (feature, result, detail).
#[derive(Debug, Args)]
pub struct Options {
    /// Port under test: a device, or a driver and a device such as mlx5:eth1
    #[arg(value_name = "PORT")]
    port: PortName,

    /// Port at the other end of the cable
    #[arg(long, value_name = "PORT")]
    peer: Option<PortName>,

    /// Largest layer-3 packet in bytes; default: that of the interface, or the device's limit, at most 9000
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u16).range(1500..=9202))]
    mtu: Option<u16>,

    /// Keys of the driver's own table, as in `[port.mlx5]`, such as "rx_mode = 'striding'"
    #[arg(long, value_name = "TOML")]
    settings: Vec<String>,

    /// Test these features only
    #[arg(long, value_name = "FEATURE", value_delimiter = ',', value_parser = FEATURES)]
    only: Vec<String>,
}

/// Features in the order of the tests.
const FEATURES: [&str; 11] =
    ["link", "frames", "tx-checksums", "rx-checksums", "vlan", "tso", "rss", "modes", "rules", "restart", "link-flap"];

/// Result of the test of one feature.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Verdict {
    /// The feature works; what was tested.
    Pass(String),
    /// The port does not have the feature; the reason.
    Skip(String),
}

/// Result of a test: an error describes the first counter-example.
type Outcome = Result<Verdict, String>;

/// One line of the report.
#[derive(Clone, Debug, Serialize)]
struct Line {
    feature: String,
    /// `pass`, `fail` or `skip`.
    result: &'static str,
    detail: String,
}

/// Output of `--json`.
#[derive(Debug, Serialize)]
struct Report<'a> {
    ports: Vec<String>,
    passed: bool,
    results: &'a [Line],
}

/// Runs the tests and prints the report.
pub fn run(options: &Options, json: bool) -> Result<(), Failure> {
    let ports = std::iter::once(&options.port).chain(&options.peer).cloned().collect();
    let wiring = Wiring { ports, settings: options.settings.clone(), mtu: options.mtu };
    let mut selftest = Selftest { wiring, only: options.only.clone(), lines: Vec::new(), quiet: json };
    selftest.run()?;
    let failed = selftest.lines.iter().filter(|line| line.result == "fail").count();
    let count = |result| selftest.lines.iter().filter(|line| line.result == result).count();
    if json {
        let ports = selftest.wiring.ports.iter().map(|port| format!("{}:{}", port.driver, port.device)).collect();
        print_json(&Report { ports, passed: failed == 0, results: &selftest.lines })?;
    } else {
        print(format_args!("{} passed, {failed} failed, {} skipped\n", count("pass"), count("skip")))?;
    }
    if failed == 0 { Ok(()) } else { Err(Failure::Silent) }
}

struct Selftest {
    wiring: Wiring,
    only: Vec<String>,
    lines: Vec<Line>,
    /// True if lines are not printed as they come.
    quiet: bool,
}

impl Selftest {
    fn wanted(&self, feature: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|only| only == feature)
    }

    /// Prints and stores the result of a test.
    fn record(&mut self, feature: &str, outcome: Outcome) -> Result<(), Failure> {
        let (result, detail) = match outcome {
            Ok(Verdict::Pass(detail)) => ("pass", detail),
            Ok(Verdict::Skip(detail)) => ("skip", detail),
            Err(detail) => ("fail", detail),
        };
        if !self.quiet {
            let mark = result.to_uppercase();
            print(format_args!("{mark}  {feature:<14} {detail}\n"))?;
        }
        self.lines.push(Line { feature: feature.to_owned(), result, detail });
        Ok(())
    }

    /// Tests one feature on started ports, if it is wanted.
    fn check(
        &mut self,
        feature: &str,
        bench: &mut Bench,
        test: impl FnOnce(&mut Bench) -> Outcome,
    ) -> Result<(), Failure> {
        if !self.wanted(feature) {
            return Ok(());
        }
        let outcome = test(bench).map_err(|error| match bench.diagnosis() {
            counters if counters.is_empty() => error,
            counters => format!("{error}; counters: {counters}"),
        });
        self.record(feature, outcome)
    }

    /// Stops the ports. Buffers that do not come back are a failure of `feature`.
    fn stop(&mut self, feature: &str, bench: Bench) -> Result<(), Failure> {
        match bench.stop()? {
            0 => Ok(()),
            lost => self.record(feature, Err(format!("{lost} buffers did not come back after the stop"))),
        }
    }

    fn run(&mut self) -> Result<(), Failure> {
        let mut bench = self.wiring.start("", 1)?;
        if !self.quiet {
            let capabilities = bench.capabilities();
            let mut table = Table::new(["PORT", "DRIVER", "MODE"]);
            table.row([capabilities.device.clone(), capabilities.driver.to_owned(), capabilities.mode.clone()]);
            print(format_args!("{table}MTU {}\n", bench.mtu))?;
        }
        let down = bench.links_down();
        if !down.is_empty() {
            self.record("link", Err(format!("no carrier on {}; is the cable or loop-back plug in?", down.join(", "))))?;
            return self.stop("link", bench);
        }
        let link = bench.port().port.link();
        if self.wanted("link") {
            self.record("link", Ok(Verdict::Pass(link.to_string())))?;
        }
        if let Err(error) = wiring_works(&mut bench) {
            self.record("link", Err(error))?;
            return self.stop("link", bench);
        }
        self.check("frames", &mut bench, checks::frames)?;
        self.check("tx-checksums", &mut bench, checks::tx_checksums)?;
        self.check("rx-checksums", &mut bench, checks::rx_checksums)?;
        self.check("vlan", &mut bench, checks::vlan)?;
        self.check("tso", &mut bench, checks::tso)?;
        let driver = bench.capabilities().driver;
        self.stop("frames", bench)?;
        if self.wanted("rss")
            && let Some(mut bench) = self.start_again("rss", QUEUES)?
        {
            self.check("rss", &mut bench, checks::rss)?;
            self.stop("rss", bench)?;
        }
        if self.wanted("modes") {
            self.modes(driver)?;
        }
        if self.wanted("rules") {
            self.rules()?;
        }
        if self.wanted("restart") {
            self.restart()?;
        }
        if self.wanted("link-flap") {
            self.link_flap()?;
        }
        Ok(())
    }

    /// Takes the link down and up at the far end, and tests frames again.
    fn link_flap(&mut self) -> Result<(), Failure> {
        let feature = "link-flap";
        let far = self.wiring.ports.last().map(|name| name.device.clone()).unwrap_or_default();
        if !std::path::Path::new("/sys/class/net").join(&far).exists() {
            let why = format!("{far} is no network interface that can be set down");
            return self.record(feature, Ok(Verdict::Skip(why)));
        }
        let Some(mut bench) = self.start_again(feature, 1)? else { return Ok(()) };
        let outcome = flap(&mut bench, &far);
        self.record(feature, outcome)?;
        self.stop(feature, bench)
    }

    /// Starts the ports for another test. A port that started before must start again, so an error is a failure of
    /// `feature`.
    fn start_again(&mut self, feature: &str, rx_queues: u16) -> Result<Option<Bench>, Failure> {
        match self.wiring.start("", rx_queues) {
            Ok(mut bench) => {
                bench.links_down();
                Ok(Some(bench))
            }
            Err(failure) => self.record(feature, Err(failure.to_string())).map(|()| None),
        }
    }

    /// Tests frames and offloads in every mode of the driver.
    fn modes(&mut self, driver: &str) -> Result<(), Failure> {
        let modes = wirepath_pmd::drivers::find(driver).map_or(&[""][..], |driver| driver.modes());
        // The driver that `auto` has chosen has these modes.
        self.wiring.ports[0].driver = driver.to_owned();
        for mode in modes.iter().filter(|mode| !mode.is_empty()) {
            let feature = format!("modes: {}", mode.replace('\n', ", "));
            let mut bench = match self.wiring.start(mode, 1) {
                Ok(bench) => bench,
                Err(failure) => {
                    self.record(&feature, Ok(Verdict::Skip(failure.to_string())))?;
                    continue;
                }
            };
            bench.links_down();
            let runs_as = bench.capabilities().mode;
            let tests = [checks::frames, checks::tx_checksums, checks::rx_checksums, checks::vlan, checks::tso];
            let outcome = tests.into_iter().try_for_each(|test| test(&mut bench).map(drop));
            self.record(&feature, outcome.map(|()| Verdict::Pass(runs_as)))?;
            self.stop(&feature, bench)?;
        }
        Ok(())
    }

    /// Tests the rules that the device offers.
    fn rules(&mut self) -> Result<(), Failure> {
        let Some(mut bench) = self.start_again("rules", 2)? else { return Ok(()) };
        let lines = rules::test(&mut bench);
        for (feature, outcome) in lines {
            self.record(&feature, outcome)?;
        }
        self.stop("rules", bench)
    }

    /// Stops and starts the ports, and tests frames again.
    fn restart(&mut self) -> Result<(), Failure> {
        let mut frames = 0;
        for _ in 0..3 {
            let Some(mut bench) = self.start_again("restart", 1)? else { return Ok(()) };
            let outcome = checks::frames(&mut bench);
            self.stop("restart", bench)?;
            if let Err(error) = outcome {
                return self.record("restart", Err(error));
            }
            frames += 1;
        }
        self.record("restart", Ok(Verdict::Pass(format!("frames are equal after each of {frames} starts"))))
    }
}

/// Sets an interface down and up, and tests frames before and after.
fn flap(bench: &mut Bench, interface: &str) -> Outcome {
    let set = |state: &str| {
        let output = Command::new("ip").args(["link", "set", "dev", interface, state]).output();
        match output {
            Ok(output) if output.status.success() => Ok(()),
            Ok(output) => {
                Err(format!("ip link set dev {interface} {state}: {}", String::from_utf8_lossy(&output.stderr)))
            }
            Err(error) => Err(format!("ip link set dev {interface} {state}: {error}")),
        }
    };
    checks::frames(bench)?;
    set("down")?;
    let seen = bench.wait_for_link_down();
    set("up")?;
    if !seen {
        return Err(format!("the port does not see that the link of {interface} went down"));
    }
    if let [down, ..] = &bench.links_down()[..] {
        return Err(format!("the link of {down} stays down"));
    }
    wiring_works(bench)?;
    checks::frames(bench)?;
    Ok(Verdict::Pass(format!("frames are equal before and after {interface} was down")))
}

/// Sends frames until one arrives. Switches and links need a moment after the start.
fn wiring_works(bench: &mut Bench) -> Result<(), String> {
    for (from, direction) in bench.directions() {
        let frame = frames::opaque(bench.address_of_receiver(from), 100, 1);
        let mut arrived = false;
        for _ in 0..5 {
            arrived = !bench.exchange_frames(from, std::slice::from_ref(&frame), 1)?.is_empty();
            if arrived {
                break;
            }
        }
        if !arrived {
            return Err(format!(
                "{direction}no frame arrives; frames that the port sends must come back to it (a loop-back plug), or \
                 arrive at the port given by --peer"
            ));
        }
    }
    Ok(())
}

/// Returns the first bytes of a frame as hexadecimal digits.
fn hex(bytes: &[u8]) -> String {
    const SHOWN: usize = 128;
    let digits: String = bytes.iter().take(SHOWN).map(|byte| format!("{byte:02x}")).collect();
    if bytes.len() > SHOWN { digits + "..." } else { digits }
}
