//! Results of a reception as text and as JSON.

use std::fmt::Write as _;

use serde_json::{Map, Value, json};
use wirepath::cli::{Rate as Scaled, Table};

use super::{CLASS_NAMES, Meter, Rates, ReceiveProgress, ReceiveResult, ReceivedRun, ReceivedStream, ReceivedSum};
use crate::pktgen::report::{drops_json, receive_drops, run_name, time};
use crate::pktgen::size::GAP;

/// Streams that the text has. The others are in the JSON only.
const MAX_ROWS: usize = 20;
/// Names of rates in the text and in JSON.
const RATES: [(&str, &str); 3] = [("pps", "pps"), ("bit/s (L2)", "bps_l2"), ("bit/s (L1)", "bps_l1")];

fn cell(rate: Option<f64>) -> String {
    rate.map_or_else(|| "-".to_owned(), |rate| Scaled(rate).to_string().trim_end().to_owned())
}

impl Meter {
    /// Returns the counts and rates as JSON. A rate is null if the packets arrived at once, or no second was whole.
    fn to_json(self) -> Map<String, Value> {
        let mut object = Map::new();
        object.insert("packets".into(), self.packets.into());
        object.insert("bytes".into(), self.bytes.into());
        object.insert("seconds".into(), self.duration().as_secs_f64().into());
        let of = |rates: Option<Rates>, at: usize| rates.map(|rates| rates[at]);
        let (lowest, highest) = self.limits().unzip();
        for (at, (_, key)) in RATES.iter().enumerate() {
            let value = json!({ "lowest": of(lowest, at), "mean": of(self.mean(), at), "highest": of(highest, at) });
            object.insert((*key).to_owned(), value);
        }
        object
    }
}

impl ReceivedSum {
    fn to_json(self) -> Map<String, Value> {
        let value = json!({
            "received": self.received,
            "lost": self.lost,
            "loss_ratio": self.loss_ratio(),
            "before_first": self.before_first,
            "duplicates": self.duplicates,
            "reordered": self.reordered,
            "max_reorder_distance": self.max_distance,
            "beyond_window": self.beyond_window,
            "corrupt": self.corrupt,
            "untracked": self.untracked,
        });
        if let Value::Object(object) = value { object } else { Map::new() }
    }
}

impl ReceivedStream {
    fn to_json(self) -> Value {
        json!({
            "stream": self.number,
            "received": self.order.distinct,
            "lost": self.lost,
            "first_sequence": self.first,
            "highest_sequence": self.highest,
            "duplicates": self.order.duplicates,
            "reordered": self.order.reordered,
            "max_reorder_distance": self.order.max_distance,
            "beyond_window": self.order.beyond_window,
            "window": self.window,
        })
    }
}

impl ReceivedRun {
    fn to_json(&self) -> Value {
        let mut object = Map::new();
        object.insert("run".into(), run_name(self.number).into());
        object.extend(self.meter.to_json());
        object.extend(self.sum().to_json());
        object.insert("streams".into(), self.streams.iter().map(|stream| stream.to_json()).collect());
        object.into()
    }
}

impl ReceiveResult {
    /// Returns the result as JSON.
    pub fn to_json(&self) -> Value {
        let ports = self.ports.iter().map(|port| {
            let mut object = Map::new();
            object.insert("name".into(), port.name.clone().into());
            object.extend(port.meter.to_json());
            object.insert("foreign".into(), port.foreign.into());
            let sizes = CLASS_NAMES.iter().zip(port.sizes).map(|(name, n)| ((*name).to_owned(), json!(n)));
            object.insert("sizes".into(), sizes.collect::<Map<_, _>>().into());
            object.insert("rx_drops".into(), drops_json(&port.rx.drops));
            object.insert("device_drops".into(), drops_json(&port.device_drops));
            object.insert("rx_injected_copies".into(), port.rx.injected_copies.into());
            object.insert("link_downs".into(), port.link_downs.into());
            object.into()
        });
        let ports: Vec<Value> = ports.collect();
        let mut object = Map::new();
        object.insert("seconds".into(), self.duration.as_secs_f64().into());
        object.insert("packets".into(), self.ports.iter().map(|port| port.meter.packets).sum::<u64>().into());
        object.insert("bytes".into(), self.ports.iter().map(|port| port.meter.bytes).sum::<u64>().into());
        object.insert("foreign".into(), self.foreign().into());
        object.extend(self.sum().to_json());
        object.insert("longest_stall_ns".into(), json!(self.longest_stall.as_nanos() as u64));
        object.insert("stalls".into(), self.stalls.into());
        object.insert("stopped".into(), self.is_stopped.into());
        object.insert("failure".into(), json!(self.failure));
        object.insert("ports".into(), ports.into());
        object.insert("runs".into(), self.runs.iter().map(ReceivedRun::to_json).collect());
        object.into()
    }

    /// Returns the result as text.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for port in &self.ports {
            let Meter { packets, bytes, .. } = port.meter;
            let foreign = port.foreign;
            let _ = writeln!(text, "port {}: {packets} packets, {bytes} bytes, {foreign} packets foreign", port.name);
            for (n, how) in receive_drops(&port.rx, &port.device_drops) {
                let _ = writeln!(text, "port {}: dropped {n} {how}", port.name);
            }
            if port.link_downs > 0 {
                let _ = writeln!(text, "port {}: its link went down {} times", port.name, port.link_downs);
            }
        }
        let _ = write!(text, "\n{}\n{}", self.rates(), self.sizes());
        if !self.runs.is_empty() {
            let _ = write!(text, "\n{}\n{}\n{}", self.run_table(), self.stream_table(), self.sum().text());
        }
        if self.stalls > 0 {
            let longest = time(self.longest_stall.as_nanos() as f64);
            let _ = writeln!(
                text,
                "{:12} {} times above 100 us between two turns, the longest {longest}",
                "stalls", self.stalls
            );
        }
        text
    }

    /// Returns the rates of all ports.
    fn rates(&self) -> Table {
        let headings = [("PORT", false), ("RATE", false), ("LOWEST", true), ("MEAN", true), ("HIGHEST", true)];
        let mut table = Table::with_columns(headings.map(|(name, right)| (name.to_owned(), right)));
        for port in &self.ports {
            let (lowest, highest) = port.meter.limits().unzip();
            let mean = port.meter.mean();
            for (at, (name, _)) in RATES.iter().enumerate() {
                let of = |rates: Option<Rates>| cell(rates.map(|rates| rates[at]));
                table.push([port.name.clone(), (*name).to_owned(), of(lowest), of(mean), of(highest)]);
            }
        }
        table
    }

    /// Returns the packets of all ports by size.
    fn sizes(&self) -> Table {
        let ports = self.ports.iter().map(|port| (port.name.clone(), true));
        let mut table = Table::with_columns([("SIZE".to_owned(), false)].into_iter().chain(ports));
        for (class, name) in CLASS_NAMES.iter().enumerate() {
            // Undersize frames are rare.
            if class > 0 || self.ports.iter().any(|port| port.sizes[0] > 0) {
                let counts = self.ports.iter().map(|port| port.sizes[class].to_string());
                table.push([(*name).to_owned()].into_iter().chain(counts));
            }
        }
        table
    }

    fn run_table(&self) -> String {
        let headings =
            ["RUN", "STREAMS", "RECEIVED", "LOST", "BEFORE FIRST", "DUPLICATES", "REORDERED", "CORRUPT", "pps"];
        let mut table = Table::with_columns(headings.map(|name| (name.to_owned(), name != "RUN")));
        for run in self.runs.iter().take(MAX_ROWS) {
            let sum = run.sum();
            let counts = [sum.received, sum.lost, sum.before_first, sum.duplicates, sum.reordered, sum.corrupt];
            let cells = [run_name(run.number), run.streams.len().to_string()].into_iter();
            let mean = cell(run.meter.mean().map(|[pps, ..]| pps));
            table.push(cells.chain(counts.map(|n| n.to_string())).chain([mean]));
        }
        table.to_string() + &rest(self.runs.len(), "runs")
    }

    fn stream_table(&self) -> String {
        let headings = ["RUN", "STREAM", "RECEIVED", "LOST", "FIRST", "HIGHEST", "DUPLICATES", "REORDERED"];
        let mut table = Table::with_columns(headings.map(|name| (name.to_owned(), name != "RUN")));
        for stream in self.runs.iter().flat_map(|run| &run.streams).take(MAX_ROWS) {
            let counts = [
                stream.number.into(),
                stream.order.distinct,
                stream.lost,
                stream.first.into(),
                stream.highest.into(),
                stream.order.duplicates,
                stream.order.reordered,
            ];
            table.push([run_name(stream.run)].into_iter().chain(counts.map(|n: u64| n.to_string())));
        }
        table.to_string() + &rest(self.runs.iter().map(|run| run.streams.len()).sum(), "streams")
    }
}

/// Names the number of rows that a table leaves out.
fn rest(all: usize, name: &str) -> String {
    match all.saturating_sub(MAX_ROWS) {
        0 => String::new(),
        more => format!("and {more} more {name}, which --json has\n"),
    }
}

impl ReceivedSum {
    /// Returns the sum as text.
    fn text(&self) -> String {
        let mut text = String::new();
        let mut line = |name: &str, value: String| {
            let _ = writeln!(text, "{name:12} {value}");
        };
        line("received", format!("{} packets", self.received));
        let percent = self.loss_ratio().unwrap_or(0.0) * 100.0;
        line("lost", format!("{} ({percent:.4} %), up to the highest received sequence numbers", self.lost));
        line("duplicates", self.duplicates.to_string());
        let distance = self.max_distance;
        line("reordered", format!("{} (RFC 4737), by at most {distance} sequence numbers", self.reordered));
        line("corrupt", self.corrupt.to_string());
        for (name, n, about) in [
            ("before first", self.before_first, "sequence numbers below the first received ones"),
            ("late", self.beyond_window, "reordered packets so late that duplicates are not recognised"),
            ("untracked", self.untracked, "packets of streams beyond --max-streams"),
        ] {
            if n > 0 {
                line(name, format!("{n} {about}"));
            }
        }
        text
    }
}

impl ReceiveProgress {
    /// Returns the rates since an earlier moment as text. `names` are those of the ports.
    pub fn text(&self, before: &Self, names: &[String]) -> String {
        let seconds = self.elapsed.saturating_sub(before.elapsed).as_secs_f64().max(1e-9);
        let headings = [format!("{:.0} s", self.elapsed.as_secs_f64())].into_iter();
        let headings = headings.chain(["PACKETS"].into_iter().chain(RATES.map(|(name, _)| name)).map(str::to_owned));
        let mut table = Table::with_columns(headings.zip([false, true, true, true, true]));
        for (at, (name, now)) in names.iter().zip(&self.ports).enumerate() {
            let was = before.ports.get(at).copied().unwrap_or_default();
            let (packets, bytes) = (now.0.saturating_sub(was.0) as f64, now.1.saturating_sub(was.1) as f64);
            let rates = [packets, bytes * 8.0, (bytes + packets * GAP as f64) * 8.0];
            let cells = [name.clone(), now.0.to_string()].into_iter();
            table.push(cells.chain(rates.map(|rate| cell(Some(rate / seconds)))));
        }
        table.to_string()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use wirepath_packet::drops::DropReason;

    use super::*;
    use crate::pktgen::receive::ReceivedPort;

    #[test]
    fn live_rates_are_those_of_the_last_second() {
        let at = |seconds, packets| ReceiveProgress {
            elapsed: Duration::from_secs(seconds),
            ports: vec![(packets, packets * 64), (0, 0)],
        };
        let expected = "3 s   PACKETS     pps  bit/s (L2)  bit/s (L1)\n\
                        west     5000  2.00 k      1.02 M      1.34 M\n\
                        east        0       0           0           0\n";
        assert_eq!(at(3, 5000).text(&at(1, 1000), &["west".to_owned(), "east".to_owned()]), expected);
        let first = at(1, 1000).text(&ReceiveProgress::default(), &["west".to_owned()]);
        assert!(first.contains("1.00 k"), "{first}");
    }

    #[test]
    fn drops_before_the_receive_queues_are_named() {
        let port = ReceivedPort {
            name: "west".to_owned(),
            device_drops: vec![(DropReason::RxFull, 7)],
            ..ReceivedPort::default()
        };
        let result = ReceiveResult {
            duration: Duration::from_secs(1),
            ports: vec![port],
            runs: Vec::new(),
            longest_stall: Duration::ZERO,
            stalls: 0,
            failure: None,
            is_stopped: false,
        };
        let text = result.text();
        assert!(text.contains("port west: dropped 7 before the receive queues: rx_full\n"), "{text}");
        assert_eq!(result.to_json()["ports"][0]["device_drops"]["rx_full"], 7);
    }

    #[test]
    fn tables_name_the_rows_they_leave_out() {
        assert_eq!(
            (rest(20, "runs"), rest(22, "runs").as_str()),
            (String::new(), "and 2 more runs, which --json has\n")
        );
    }
}
