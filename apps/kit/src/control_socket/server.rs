use std::collections::VecDeque;
use std::fs::DirBuilder;
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};
use wirepath_control_socket::{Answer, Limits, LineServer, Listener, Peer, Service, remove_abandoned};
use wirepath_pipeline::registry::{
    Argument, Change, Changed, Column, ColumnKind, Command, CommandSpec, Filter, Listing, Management, MetricsFormat,
    MetricsText, ObjectSpec, Operation, PendingChange, Registry, TableSpec,
};
use wirepath_pipeline::{Control, ControlPlane};

use super::http::MetricsServer;
use super::observe::{NewCapture, TraceAnswer};
use super::perf::PerfAnswer;
use super::settings::{ControlSettings, MayChange};
use super::{VERSION, client};
use crate::capture::SocketCapture;
use crate::cli::{Failure, log};

/// Entries of one part of a listing. Some entries take a call of a device.
const PART: usize = 128;
/// Time after which a turn makes no other part of the text for HTTP.
const METRICS_TIME: Duration = Duration::from_millis(2);
/// Minimum time between two log messages about clients that cannot be accepted.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// The control socket of a running program, and its address for metrics.
#[derive(Debug)]
pub struct ControlSocket {
    server: Option<LineServer<Rest>>,
    metrics: Option<MetricsServer>,
    /// Text that is made for [`Self::metrics`].
    text: Option<(MetricsText, String)>,
    /// Captures for clients.
    captures: Vec<SocketCapture>,
    /// Time of the last message about clients that cannot be accepted.
    refused_at: Option<Instant>,
    program: Program,
}

/// Properties of the program, for the request `status`.
#[derive(Debug)]
struct Program {
    name: &'static str,
    configuration: Option<PathBuf>,
    started: Instant,
    change: MayChange,
    /// Address of the metrics by HTTP.
    metrics: Option<SocketAddr>,
}

/// Part of an answer that is still to be made.
#[derive(Debug)]
enum Rest {
    Rows(RestOfRows),
    Metrics(Box<MetricsText>),
    /// A change that is not carried out yet.
    Change(PendingChange),
    /// Rest of a text.
    Text(VecDeque<Value>),
    Capture(Box<NewCapture>),
    Trace(Box<TraceAnswer>),
    Perf(PerfAnswer),
}

/// Rows that an answer to `show` still lacks.
#[derive(Debug)]
struct RestOfRows {
    listing: Listing,
    /// Rows that the client still wants.
    left: usize,
    first: bool,
}

impl ControlSocket {
    /// Finds why [`Self::open`] would fail, without making the socket.
    ///
    /// # Errors
    /// The errors of [`Self::open`].
    pub fn check(settings: &ControlSettings) -> Result<(), Failure> {
        if let Some(path) = &settings.socket {
            Listener::check(path).map_err(|error| not_listening(path.display(), &error))?;
        }
        let checked = settings.metrics.map(|address| (address, MetricsServer::check(address)));
        checked.map_or(Ok(()), |(address, checked)| checked.map_err(|error| not_listening(address, &error)))
    }

    /// Listens on the socket and the address of the settings. `name` is the name of the program. Returns `None` if
    /// there shall be neither. There is no default socket if no folder for it can be written.
    ///
    /// # Errors
    /// If the socket of the settings cannot be made, or the address cannot be used.
    pub fn open(
        settings: &ControlSettings,
        name: &'static str,
        configuration: Option<&Path>,
    ) -> Result<Option<Self>, Failure> {
        let listener = match &settings.socket {
            _ if settings.off => None,
            Some(path) => {
                let bound = Listener::bind(path, &settings.access);
                Some(bound.map_err(|error| not_listening(path.display(), &error))?)
            }
            None => {
                let bound = bind_default(settings, name);
                bound.inspect_err(|error| tracing::info!("there is no control socket: {error}")).ok()
            }
        };
        let open = |address| MetricsServer::open(address).map_err(|error| not_listening(address, &error));
        let metrics = settings.metrics.map(open).transpose()?;
        if listener.is_none() && metrics.is_none() {
            return Ok(None);
        }
        if let Some(listener) = &listener {
            tracing::info!("control socket: {}", listener.path().display());
        }
        let address = metrics.as_ref().map(MetricsServer::address);
        if let Some(address) = address {
            tracing::info!("metrics: http://{address}/metrics");
        }
        let configuration = configuration.map(|path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned()));
        let program =
            Program { name, configuration, started: Instant::now(), change: settings.change, metrics: address };
        let server = listener.map(|listener| LineServer::new(listener, Limits::default()));
        Ok(Some(Self { server, metrics, text: None, captures: Vec::new(), refused_at: None, program }))
    }

    /// Makes the text that HTTP needs, for a bounded time.
    fn serve_metrics(&mut self, registry: &mut Registry<'_>) {
        let Some(server) = &mut self.metrics else { return };
        if self.text.is_none()
            && let Some(format) = server.request()
        {
            self.text = Some((self.program.metrics(format, registry), String::new()));
        }
        let end = Instant::now() + METRICS_TIME;
        while let Some((text, made)) = &mut self.text
            && Instant::now() < end
        {
            if !text.next_part(registry, made) {
                server.answer(std::mem::take(made));
                self.text = None;
            }
        }
    }
}

fn not_listening(place: impl std::fmt::Display, error: &io::Error) -> Failure {
    let text = format!("{place}: {error}");
    if error.kind() == ErrorKind::AddrInUse { Failure::usage(text) } else { Failure::failed(text) }
}

/// Listens on the default socket, in the first folder that can be written.
fn bind_default(settings: &ControlSettings, name: &str) -> Result<Listener, String> {
    let mut errors = Vec::new();
    for folder in client::folders() {
        let made = DirBuilder::new().recursive(true).mode(0o755).create(&folder);
        // Sockets of killed programs would stay for ever, because their names are not used again.
        for path in client::sockets_in(&folder) {
            remove_abandoned(&path);
        }
        let path = folder.join(format!("{name}-{}.sock", std::process::id()));
        match made.and_then(|()| Listener::bind(&path, &settings.access)) {
            Ok(listener) => return Ok(listener),
            Err(error) => errors.push(format!("{}: {error}", path.display())),
        }
    }
    Err(errors.join("; "))
}

impl Management for ControlSocket {
    fn serve(&mut self, control: &mut dyn Control, plane: &mut ControlPlane) -> bool {
        let mut registry = Registry { control, plane };
        self.serve_metrics(&mut registry);
        let Some(server) = &mut self.server else { return false };
        let (captures, refused_at) = (&mut self.captures, &mut self.refused_at);
        server.serve(&mut Requests { program: &self.program, captures, refused_at, registry })
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.server.as_ref()?.descriptor()
    }
}

impl Drop for ControlSocket {
    /// Waits for the captures, which have ended with the program.
    fn drop(&mut self) {
        self.captures.drain(..).for_each(SocketCapture::join);
    }
}

/// A program while it serves its socket.
struct Requests<'a> {
    program: &'a Program,
    captures: &'a mut Vec<SocketCapture>,
    refused_at: &'a mut Option<Instant>,
    registry: Registry<'a>,
}

impl Requests<'_> {
    fn answer_to(&mut self, peer: &Peer, request: &[u8]) -> Result<Reply, String> {
        let value: Value = serde_json::from_slice(request).map_err(|error| format!("no JSON: {error}"))?;
        let Value::Object(mut request) = value else { return Err("expected a JSON object".to_owned()) };
        if let Some(version) = request.remove("version")
            && version != VERSION
        {
            return Err(format!("version {version} is unknown; this program knows version {VERSION}"));
        }
        let Some(Value::String(kind)) = request.remove("request") else {
            return Err("expected the key \"request\" with a text".to_owned());
        };
        let known: &[&str] = match kind.as_str() {
            "show" => &["table", "where", "limit"],
            "metrics" => &["format"],
            "add" | "set" | "remove" => &["object", "arguments"],
            "command" => &["name", "arguments"],
            "log" => &["level", "module"],
            "reload" => &["dry_run"],
            "capture" => super::observe::CAPTURE_KEYS,
            "trace" => super::observe::TRACE_KEYS,
            "perf" => &["seconds", "slow_us", "worker", "turns"],
            _ => &[],
        };
        if let Some(key) = request.keys().find(|key| !known.contains(&key.as_str())) {
            return Err(format!("{kind}: unknown key \"{key}\""));
        }
        match kind.as_str() {
            "status" => Ok(Reply::Line(self.program.status())),
            "tables" => {
                Ok(Reply::Line(json!({ "tables": self.registry.tables().into_iter().map(table).collect::<Vec<_>>() })))
            }
            "objects" => {
                let objects = self.registry.control.objects();
                Ok(Reply::Line(json!({ "objects": objects.into_iter().map(object).collect::<Vec<_>>() })))
            }
            "commands" => {
                let commands = self.registry.commands()?;
                Ok(Reply::Line(json!({ "commands": commands.into_iter().map(command).collect::<Vec<_>>() })))
            }
            "command" => self.command(peer, &request).map(Reply::Line),
            "show" => self.show(&request).map(|rest| Reply::Rest(Rest::Rows(rest))),
            "metrics" => {
                let format = match request.get("format").map(Value::as_str) {
                    None | Some(Some("openmetrics")) => MetricsFormat::OpenMetrics,
                    Some(Some("prometheus")) => MetricsFormat::Prometheus,
                    Some(_) => return Err("format: expected \"openmetrics\" or \"prometheus\"".to_owned()),
                };
                Ok(Reply::Rest(Rest::Metrics(Box::new(self.program.metrics(format, &mut self.registry)))))
            }
            "log" => self.log(peer, &request).map(Reply::Line),
            "reload" => self.reload(peer, &request).map(Reply::from),
            "configuration" => {
                let text = self.registry.control.configuration(&peer.to_string())?;
                Ok(Reply::Rest(Rest::Change(text)))
            }
            "capture" => {
                self.check_may_change(peer)?;
                let capture = super::observe::capture(peer, &request, &mut self.registry)?;
                Ok(Reply::Rest(Rest::Capture(Box::new(capture))))
            }
            "trace" => {
                self.check_may_change(peer)?;
                let trace = super::observe::trace(peer, &request, &mut self.registry)?;
                Ok(Reply::Rest(Rest::Trace(Box::new(trace))))
            }
            "perf" => {
                // A measurement slows the workers down a little.
                self.check_may_change(peer)?;
                PerfAnswer::begin(&request, self.registry.plane).map(|answer| Reply::Rest(Rest::Perf(answer)))
            }
            other => match Operation::of_name(other) {
                Some(operation) => self.change(peer, operation, &request).map(Reply::from),
                None => Err(format!(
                    "unknown request \"{other}\"; expected status, tables, show, metrics, objects, add, set, remove, \
                     commands, command, reload, configuration, log, perf, capture or trace"
                )),
            },
        }
    }

    fn show(&mut self, request: &Map<String, Value>) -> Result<RestOfRows, String> {
        let name = text(request, "table")?;
        let table = self.registry.table(name).ok_or_else(|| {
            let names: Vec<&str> = self.registry.tables().iter().map(|table| table.name).collect();
            match wirepath_settings::nearest(name, &names) {
                Some(near) => format!("there is no table \"{name}\"; did you mean \"{near}\"?"),
                None => format!("there is no table \"{name}\"; there are {}", names.join(", ")),
            }
        })?;
        let conditions: Vec<&str> = match request.get("where") {
            None => Vec::new(),
            Some(list) => {
                let texts = list.as_array().and_then(|list| list.iter().map(Value::as_str).collect());
                texts.ok_or("where: expected a list of texts such as \"port=wan\"")?
            }
        };
        let left = match request.get("limit") {
            None => usize::MAX,
            Some(limit) => limit
                .as_u64()
                .filter(|limit| *limit > 0)
                .map(|limit| usize::try_from(limit).unwrap_or(usize::MAX))
                .ok_or("limit: expected a number from 1 on")?,
        };
        let filter = Filter::parse(table, &conditions).map_err(|error| error.to_string())?;
        Ok(RestOfRows { listing: Listing::new(table, filter), left, first: true })
    }

    /// Returns an error unless the client may change the program.
    fn check_may_change(&self, peer: &Peer) -> Result<(), String> {
        if self.program.change.allows(peer) {
            return Ok(());
        }
        let key = match self.program.change {
            MayChange::Owner => "\"owner\"",
            _ => "\"group\"",
        };
        Err(format!("user {} may not change this program ([control] change = {key})", peer.uid))
    }

    fn log(&self, peer: &Peer, request: &Map<String, Value>) -> Result<Value, String> {
        if request.contains_key("level") {
            self.check_may_change(peer)?;
            let module = request.get("module").map(|_| text(request, "module")).transpose()?;
            match text(request, "level")? {
                "reset" => log::reset(module)?,
                level => log::set(log::parse_level(level)?, module)?,
            }
            tracing::info!("the levels of the log are {} now, by {peer}", log::levels());
        } else if request.contains_key("module") {
            return Err("expected the key \"level\" with a text".to_owned());
        }
        Ok(json!({ "levels": log::levels() }))
    }

    fn reload(&mut self, peer: &Peer, request: &Map<String, Value>) -> Result<Changed, String> {
        let dry_run = match request.get("dry_run") {
            None => false,
            Some(value) => value.as_bool().ok_or("dry_run: expected true or false")?,
        };
        self.check_may_change(peer)?;
        self.registry.control.reload(dry_run, &peer.to_string())
    }

    fn change(&mut self, peer: &Peer, operation: Operation, request: &Map<String, Value>) -> Result<Changed, String> {
        self.check_may_change(peer)?;
        let object = text(request, "object")?;
        let none = Map::new();
        let arguments = arguments(request, &none)?;
        let origin = peer.to_string();
        self.registry.change(&Change { operation, object, arguments, origin: &origin })
    }

    fn command(&mut self, peer: &Peer, request: &Map<String, Value>) -> Result<Value, String> {
        self.check_may_change(peer)?;
        let name = text(request, "name")?;
        let none = Map::new();
        let arguments = arguments(request, &none)?;
        let origin = peer.to_string();
        let result = self.registry.command(&Command { name, arguments, origin: &origin });
        // As JSON, because names and arguments are the client's.
        let given = json!({ "name": name, "arguments": arguments });
        match &result {
            Ok(_) => tracing::info!("command by {origin}: {given}"),
            Err(error) => tracing::info!("command by {origin} refused: {given}: {}", json!(error)),
        }
        Ok(json!({ "result": result? }))
    }

    /// Appends the next line of an answer to `show`.
    fn rows(&mut self, mut rest: RestOfRows, out: &mut Vec<u8>) -> Answer<Rest> {
        let mut rows = self.registry.next_page(&mut rest.listing, PART);
        rows.truncate(rest.left);
        rest.left -= rows.len();
        let more = !rest.listing.is_done() && rest.left > 0;
        // A part without rows costs the client nothing.
        if rows.is_empty() && more && !rest.first {
            return Answer::More(Rest::Rows(rest));
        }
        let mut line = json!({ "ok": true, "rows": rows });
        if std::mem::take(&mut rest.first) {
            let columns = rest.listing.table().columns.iter().map(|column| column.name);
            line["columns"] = columns.collect();
        }
        if more {
            line["more"] = true.into();
        }
        append(out, &line);
        if more { Answer::More(Rest::Rows(rest)) } else { Answer::Done }
    }

    /// Appends the answer to a change, if its outcome is known.
    fn outcome(&mut self, change: PendingChange, out: &mut Vec<u8>) -> Answer<Rest> {
        match change.take() {
            None => return Answer::Later(Rest::Change(change)),
            Some(Err(why)) => self.refuse(&why, out),
            Some(Ok(Value::Array(parts))) => return Answer::More(Rest::Text(parts.into())),
            Some(Ok(mut line)) => {
                line["ok"] = true.into();
                append(out, &line);
            }
        }
        Answer::Done
    }

    /// Appends the next line of an answer to `metrics`.
    fn metrics(&mut self, mut rest: Box<MetricsText>, out: &mut Vec<u8>) -> Answer<Rest> {
        let mut text = String::new();
        let more = rest.next_part(&mut self.registry, &mut text);
        if !more {
            append(out, &json!({ "ok": true, "text": text }));
            return Answer::Done;
        }
        if !text.is_empty() {
            append(out, &json!({ "ok": true, "text": text, "more": true }));
        }
        Answer::More(Rest::Metrics(rest))
    }
}

/// An answer.
enum Reply {
    /// An object, to which `ok` is added.
    Line(Value),
    Rest(Rest),
}

impl Service for Requests<'_> {
    type Rest = Rest;

    fn answer(&mut self, peer: &Peer, request: &[u8], out: &mut Vec<u8>) -> Answer<Rest> {
        match self.answer_to(peer, request) {
            Ok(Reply::Rest(rest)) => return self.resume(rest, out),
            Ok(Reply::Line(mut line)) => {
                line["ok"] = true.into();
                append(out, &line);
            }
            Err(error) => self.refuse(&error, out),
        }
        Answer::Done
    }

    fn resume(&mut self, rest: Rest, out: &mut Vec<u8>) -> Answer<Rest> {
        match rest {
            Rest::Rows(rest) => self.rows(rest, out),
            Rest::Metrics(rest) => self.metrics(rest, out),
            Rest::Change(change) => self.outcome(change, out),
            Rest::Text(mut parts) => {
                let text = parts.pop_front().unwrap_or_else(|| "".into());
                if parts.is_empty() {
                    append(out, &json!({ "ok": true, "text": text }));
                    return Answer::Done;
                }
                append(out, &json!({ "ok": true, "text": text, "more": true }));
                Answer::More(Rest::Text(parts))
            }
            Rest::Capture(rest) => Answer::HandOver(Rest::Capture(rest)),
            Rest::Trace(mut rest) => match rest.next_line(self.registry.plane.ports()) {
                Some(line) => {
                    append(out, &line);
                    if line["more"] == true { Answer::More(Rest::Trace(rest)) } else { Answer::Done }
                }
                None => Answer::Later(Rest::Trace(rest)),
            },
            Rest::Perf(rest) => match rest.resume(self.registry.plane, out) {
                Answer::Done => Answer::Done,
                Answer::More(rest) | Answer::HandOver(rest) => Answer::More(Rest::Perf(rest)),
                Answer::Later(rest) => Answer::Later(Rest::Perf(rest)),
            },
        }
    }

    fn take(&mut self, peer: &Peer, rest: Rest, stream: UnixStream) {
        if let Rest::Capture(capture) = rest {
            self.captures.retain(|capture| !capture.has_ended());
            self.captures.extend(capture.start(peer, stream));
        }
    }

    fn refuse(&mut self, why: &str, out: &mut Vec<u8>) {
        append(out, &json!({ "ok": false, "error": why }));
    }

    fn cannot_accept(&mut self, error: &io::Error) {
        if self.refused_at.is_none_or(|at| at.elapsed() >= LOG_INTERVAL) {
            *self.refused_at = Some(Instant::now());
            tracing::warn!(
                "the control socket has no room for a client: {error}; clients are served one after another. Raise the \
                 limit of open files (LimitNOFILE= of systemd.exec, or prlimit --nofile)"
            );
        }
    }
}

impl From<Changed> for Reply {
    fn from(changed: Changed) -> Self {
        match changed {
            Changed::Done(line) => Self::Line(line),
            Changed::Pending(change) => Self::Rest(Rest::Change(change)),
        }
    }
}

pub(super) fn append(out: &mut Vec<u8>, line: &Value) {
    out.extend_from_slice(line.to_string().as_bytes());
    out.push(b'\n');
}

pub(super) fn text<'r>(request: &'r Map<String, Value>, key: &str) -> Result<&'r str, String> {
    request.get(key).and_then(Value::as_str).ok_or_else(|| format!("expected the key \"{key}\" with a text"))
}

/// Returns the arguments of a change or a command.
fn arguments<'r>(
    request: &'r Map<String, Value>,
    none: &'r Map<String, Value>,
) -> Result<&'r Map<String, Value>, &'static str> {
    request.get("arguments").map_or(Ok(none), |it| it.as_object().ok_or("arguments: expected an object"))
}

impl Program {
    fn status(&self) -> Value {
        json!({
            "program": self.name,
            "release": env!("CARGO_PKG_VERSION"),
            "version": VERSION,
            "pid": std::process::id(),
            "uptime": self.started.elapsed().as_secs_f64(),
            "configuration": self.configuration,
            "metrics": self.metrics,
        })
    }

    /// Begins the text of the metrics.
    fn metrics(&self, format: MetricsFormat, registry: &mut Registry<'_>) -> MetricsText {
        let configuration = self.configuration.as_ref().map(|path| path.display().to_string()).unwrap_or_default();
        let release = env!("CARGO_PKG_VERSION");
        let labels = [("program", self.name), ("release", release), ("configuration", &configuration)];
        MetricsText::new(format, registry, &labels)
    }
}

fn table(table: &TableSpec) -> Value {
    let column = |column: &Column| {
        let (kind, unit) = match column.kind {
            ColumnKind::Key => ("key", ""),
            ColumnKind::Attribute => ("attribute", ""),
            ColumnKind::Counter(unit) => ("counter", unit.name()),
            ColumnKind::Gauge(unit) => ("gauge", unit.name()),
        };
        json!({ "name": column.name, "kind": kind, "unit": unit, "about": column.about })
    };
    let columns: Vec<Value> = table.columns.iter().map(column).collect();
    json!({ "name": table.name, "about": table.about, "columns": columns })
}

fn object(object: &ObjectSpec) -> Value {
    let operations = object
        .operations
        .iter()
        .map(|(operation, arguments)| json!({ "name": operation.name(), "arguments": arguments_json(arguments) }));
    json!({ "name": object.name, "about": object.about, "operations": operations.collect::<Vec<_>>() })
}

fn command(command: &CommandSpec) -> Value {
    json!({ "name": command.name, "about": command.about, "arguments": arguments_json(command.arguments) })
}

fn arguments_json(arguments: &[Argument]) -> Value {
    let arguments = arguments.iter();
    arguments
        .map(|it| json!({ "name": it.name, "about": it.about, "kind": it.kind.name(), "required": it.required }))
        .collect()
}
