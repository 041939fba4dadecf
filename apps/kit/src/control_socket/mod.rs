//! The control socket: how operators look into a running program and change it.
//!
//! Every program that forwards listens on a UNIX stream socket. Requests and answers are JSON objects of one line
//! each. A connection may carry several requests; the answers come in their order.
//!
//! | Request | Answer |
//! |---|---|
//! | `{"request": "status"}` | `program`, `release`, `version`, `pid`, `uptime`, `configuration`, `metrics` |
//! | `{"request": "tables"}` | `tables`: `name`, `about` and `columns` of each table |
//! | `{"request": "show", "table": "ports"}` | `columns`: their names; `rows`: a list of cells for each row |
//! | `{"request": "metrics", "format": "openmetrics"}` | `text`: the metrics; other form: `prometheus` |
//! | `{"request": "objects"}` | `objects`: `name`, `about` and `operations` of what can be changed |
//! | `{"request": "add", "object": "rule", "arguments": {"rule": "..."}}` | properties of the object, such as `id` |
//! | `set` and `remove` instead of `add` | the same |
//! | `{"request": "commands"}` | `commands`: `name`, `about` and `arguments` of each command of the application |
//! | `{"request": "command", "name": "...", "arguments": {"key": "..."}}` | `result`: any value, as the command says |
//! | `{"request": "reload", "dry_run": true}` | `applied`, `differences`, `omitted`, `notes` |
//! | `{"request": "configuration"}` | `text`: the configuration in force, as TOML |
//! | `{"request": "log", "level": "debug", "module": "wirepath_pmd"}` | `levels` in force after the change |
//! | `{"request": "log", "level": "reset", "module": "wirepath_pmd"}` | the same: the configured level |
//! | `{"request": "log"}` | `levels` in force |
//! | `{"request": "capture", "points": ["drops"]}` | packets as pcapng: see below |
//! | `{"request": "trace", "count": 10}` | `trace` for each packet: see below |
//! | `{"request": "perf", "seconds": 1}` | `workers`: figures of each worker after that time (see below) |
//!
//! A column has `name`, `kind` (`key`, `attribute`, `counter` or `gauge`), `unit` and `about`.
//!
//! Each answer has `"ok": true`, or `"ok": false` and the reason as `error`. A long answer to `show` has several
//! lines with `rows`, one to `metrics` or `configuration` lines with `text`; all but the last one have `"more": true`.
//!
//! `show` takes `"where"`, a list of conditions such as `"port=wan"` ([`wirepath_pipeline::registry::Filter`]), and
//! `"limit"`, a number of rows. `uptime` is in seconds, `metrics` the address of the metrics by HTTP.
//!
//! `perf` makes the workers measure until its answer. It takes `"worker"`, the index of one, `"slow_us"`, the
//! microseconds above which a turn is suspicious, and `"turns": true` for the last busy turns. The answer has a line
//! for each worker with cycles by stage, histograms and slow turns. It needs the right to change the program. The
//! measurement ends with the answer or the connection.
//!
//! Every request may carry `"version": 1`. A program that does not know the version refuses the request. Later
//! versions may add requests, keys and columns, so clients ignore keys that they do not know.
//!
//! A change of an object of the configuration, and a reload, are answered when they are carried out or refused. Changes
//! are carried out one after the other. Each of `differences` has a `path`, and its value `before` and `after`;
//! `omitted` is the number of those that are not listed. `notes` are lines for the operator.
//! `capture` takes `"points"`, a list of `rx`, `tx` and `drops` (default: all); `"reason"` of drops; `"port"`;
//! instead of points `"segment"`, whose frames are captured as they enter it, without tunnel headers;
//! `"pattern"`, a pattern as in the text of a rule; `"snap"`, bytes of each packet; `"rate"`, packets per second; and
//! its end: `"count"`, `"bytes"` and `"seconds"`. The first line of the answer has `format`. Each further line with
//! `bytes` has that number of bytes behind it: whole blocks of one pcapng file. The last line, without `more`, has
//! `captured`, `left_out` by reason and `end`. A client that shuts its side down gets what is captured up to then.
//!
//! `trace` takes `"port"`, `"pattern"`, `"count"` (default 10) and `"seconds"`. The first line of the answer says
//! that the workers wait for packets. Each further line has a `trace`: `time` of the receipt in seconds since 1970,
//! `worker`, `port`, `queue`, `steps` with `stage` and `text`, `ends`, and `truncated`. The last line has `traced` and
//! `left_out`. An end has `end`: `sent`, `dropped`, `punted`, `handed_over`, `sent_by_worker` or `kernel`, and what
//! belongs to it.
//!
//! Who may connect, may look: the mode and the group of the socket file decide. Who may change is checked by the
//! credentials of the peer (`SO_PEERCRED`, unix(7)), and each change is logged with them. Captures and traces show the
//! packets of others, so they need the same right and are logged too. So do commands of the application. No client
//! holds the control thread or a worker: see [`wirepath_control_socket::LineServer`].
//!
//! The key `metrics` of `[control]` names an address where the metrics are read by HTTP, in either form by the field
//! `Accept`: see [`wirepath_pipeline::registry::MetricsText`].

mod client;
mod http;
mod observe;
mod perf;
mod server;
mod settings;

pub use client::{Client, Rows, SocketArgument};
pub use server::ControlSocket;
pub use settings::{CONTROL, ControlSettings, MayChange};

/// Version of the protocol.
pub const VERSION: u64 = 1;
