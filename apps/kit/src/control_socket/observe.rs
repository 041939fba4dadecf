//! The requests `capture` and `trace`.

use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};
use wirepath_control_socket::Peer;
use wirepath_flow::Ports;
use wirepath_packet::drops::DropReason;
use wirepath_pipeline::PortInfo;
use wirepath_pipeline::observe::{
    CaptureReader, CaptureSpec, MAX_TRACES, Pattern, Trace, TraceEnd, TraceReader, TraceSpec, WallClock,
};
use wirepath_pipeline::registry::Registry;
use wirepath_pmd::drivers::r#virtual::pcap::MAX_FRAME;
use wirepath_pmd::port::PortId;

use super::server::text;
use crate::capture::{CaptureLimits, SocketCapture};

pub(super) const CAPTURE_KEYS: &[&str] =
    &["points", "reason", "port", "segment", "pattern", "snap", "rate", "count", "bytes", "seconds"];
pub(super) const TRACE_KEYS: &[&str] = &["port", "pattern", "count", "seconds"];

/// Longest time of a capture or trace: ten years.
const MAX_TIME: Duration = Duration::from_secs(10 * 365 * 86_400);
/// Packets that `trace` follows without the key `count`.
const DEFAULT_TRACES: u64 = 10;
/// Longest wait for the workers to take part in a trace.
const BEGIN_TIMEOUT: Duration = Duration::from_secs(1);

/// A capture whose thread has not started yet.
#[derive(Debug)]
pub(super) struct NewCapture {
    reader: CaptureReader,
    limits: CaptureLimits,
    ports: Vec<String>,
}

impl NewCapture {
    /// Starts the thread, which owns the connection from now on.
    pub(super) fn start(self, peer: &Peer, stream: UnixStream) -> Option<SocketCapture> {
        SocketCapture::start(peer, stream, self.reader, self.limits, &self.ports)
    }
}

/// Begins a capture.
pub(super) fn capture(
    peer: &Peer,
    request: &Map<String, Value>,
    registry: &mut Registry<'_>,
) -> Result<NewCapture, String> {
    let points: Vec<&str> = match request.get("points") {
        None => vec!["rx", "tx", "drops"],
        Some(list) => {
            let names = list.as_array().and_then(|list| list.iter().map(Value::as_str).collect::<Option<Vec<_>>>());
            let known =
                |names: &Vec<&str>| !names.is_empty() && names.iter().all(|name| ["rx", "tx", "drops"].contains(name));
            names.filter(known).ok_or("points: expected a list of \"rx\", \"tx\" and \"drops\"")?
        }
    };
    let reason = request.get("reason").map(|_| reason(text(request, "reason")?)).transpose()?;
    if reason.is_some() && !points.contains(&"drops") {
        return Err("reason: only drops have one, and \"points\" does not contain \"drops\"".to_owned());
    }
    let (port, pattern) = selection(request, registry.plane.ports())?;
    let segment = request.get("segment").map(|_| text(request, "segment")).transpose()?;
    if segment.is_some() && request.contains_key("points") {
        return Err("segment: its frames are captured as they enter it, so \"points\" has no meaning".to_owned());
    }
    let segment = segment.map(|name| registry.control.follow_segment(name)).transpose()?;
    let spec = CaptureSpec {
        segment,
        rx: points.contains(&"rx"),
        tx: points.contains(&"tx"),
        drops: points.contains(&"drops"),
        reason,
        port,
        pattern,
        snap: number(request, "snap", MAX_FRAME as u64)?.map_or(MAX_FRAME, |snap| snap as usize),
        rate: number(request, "rate", u64::MAX)?,
    };
    let limits = CaptureLimits {
        count: number(request, "count", u64::MAX)?,
        bytes: number(request, "bytes", u64::MAX)?,
        time: seconds(request)?,
    };
    let parser = registry.control.parser();
    let reader = registry.plane.start_capture(spec, parser).map_err(|error| error.to_string())?;
    let ports = registry.plane.ports().iter().map(|port| port.name.clone()).collect();
    tracing::info!("capture by {peer}: {}", json!(request).to_string());
    Ok(NewCapture { reader, limits, ports })
}

/// An answer to `trace`.
#[derive(Debug)]
pub(super) struct TraceAnswer {
    reader: TraceReader,
    begin: Instant,
    end: Option<Instant>,
    begun: bool,
    clock: WallClock,
}

/// Begins a trace.
pub(super) fn trace(
    peer: &Peer,
    request: &Map<String, Value>,
    registry: &mut Registry<'_>,
) -> Result<TraceAnswer, String> {
    let (port, pattern) = selection(request, registry.plane.ports())?;
    let count = number(request, "count", u64::from(MAX_TRACES))?.unwrap_or(DEFAULT_TRACES);
    let time = seconds(request)?;
    let spec = TraceSpec { port, pattern, count: count as u32 };
    let parser = registry.control.parser();
    let reader = registry.plane.start_trace(spec, parser).map_err(|error| error.to_string())?;
    tracing::info!("trace by {peer}: {}", json!(request).to_string());
    let begin = Instant::now();
    let end = time.and_then(|time| begin.checked_add(time));
    Ok(TraceAnswer { reader, begin, end, begun: false, clock: WallClock::new() })
}

impl TraceAnswer {
    /// Returns the next line of the answer; `None` if there is nothing to report at present.
    pub(super) fn next_line(&mut self, ports: &[PortInfo]) -> Option<Value> {
        if !self.begun {
            self.begun = self.reader.has_begun() || self.begin.elapsed() > BEGIN_TIMEOUT;
            return self.begun.then(|| json!({ "ok": true, "more": true }));
        }
        if let Some(trace) = self.reader.next_trace() {
            let time = self.clock.time_of(trace.ticks);
            return Some(json!({ "ok": true, "trace": trace_json(&trace, time, ports), "more": true }));
        }
        let over = self.reader.is_complete() || self.end.is_some_and(|end| Instant::now() >= end);
        over.then(|| json!({ "ok": true, "traced": self.reader.read(), "left_out": self.reader.left_out() }))
    }
}

fn trace_json(trace: &Trace, time: u64, ports: &[PortInfo]) -> Value {
    let port = |id: PortId| ports.get(id.index()).map(|port| port.name.as_str());
    let end = |end: &TraceEnd| match *end {
        TraceEnd::Sent { port: id, queue, packets } => {
            json!({ "end": "sent", "port": port(id), "queue": queue, "packets": packets })
        }
        TraceEnd::Dropped { reason, packets } => {
            json!({ "end": "dropped", "reason": reason.name(), "about": reason.text(), "packets": packets })
        }
        TraceEnd::Punted { code } => json!({ "end": "punted", "code": code }),
        TraceEnd::HandedOver { worker } => json!({ "end": "handed_over", "worker": worker }),
        TraceEnd::SentByWorker { worker, port: id } => {
            json!({ "end": "sent_by_worker", "worker": worker, "port": port(id) })
        }
        TraceEnd::Kernel => json!({ "end": "kernel" }),
    };
    json!({
        "time": time as f64 / 1e9,
        "worker": trace.worker,
        "port": port(trace.port),
        "queue": trace.queue,
        "steps": trace.steps.iter().map(|step| json!({ "stage": step.stage, "text": step.text })).collect::<Vec<_>>(),
        "ends": trace.ends.iter().map(end).collect::<Vec<_>>(),
        "truncated": trace.truncated,
    })
}

/// Reads the keys that select packets.
fn selection(request: &Map<String, Value>, ports: &[PortInfo]) -> Result<(Option<PortId>, Option<Pattern>), String> {
    let names: Vec<(&str, PortId)> =
        ports.iter().filter(|port| !port.is_removed).map(|port| (port.name.as_str(), port.id)).collect();
    let port = match request.get("port") {
        None => None,
        Some(_) => {
            let name = text(request, "port")?;
            let found = names.iter().find(|(known, _)| *known == name).map(|(_, id)| *id);
            let known: Vec<&str> = names.iter().map(|(name, _)| *name).collect();
            Some(found.ok_or_else(|| format!("port: there is no port \"{name}\"; there are {}", known.join(", ")))?)
        }
    };
    let pattern = match request.get("pattern") {
        None => None,
        Some(_) => {
            let parsed = Pattern::parse(text(request, "pattern")?, Ports(&names));
            Some(parsed.map_err(|error| format!("pattern: {error}"))?)
        }
    };
    Ok((port, pattern))
}

fn reason(name: &str) -> Result<DropReason, String> {
    DropReason::of_name(name).ok_or_else(|| {
        let names: Vec<&str> = DropReason::all().map(DropReason::name).collect();
        match wirepath_settings::nearest(name, &names) {
            Some(near) => format!("reason: there is no drop reason \"{name}\"; did you mean \"{near}\"?"),
            None => format!("reason: there is no drop reason \"{name}\"; there are {}", names.join(", ")),
        }
    })
}

fn number(request: &Map<String, Value>, key: &str, most: u64) -> Result<Option<u64>, String> {
    let Some(value) = request.get(key) else { return Ok(None) };
    let number = value.as_u64().filter(|number| (1..=most).contains(number));
    number.map(Some).ok_or_else(|| format!("{key}: found {value}, expected a number from 1 to {most}"))
}

fn seconds(request: &Map<String, Value>) -> Result<Option<Duration>, String> {
    let Some(value) = request.get("seconds") else { return Ok(None) };
    let time = value.as_f64().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    let time = time.filter(|time| !time.is_zero() && *time <= MAX_TIME);
    time.map(Some).ok_or_else(|| format!("seconds: found {value}, expected a number above 0 and at most ten years"))
}
