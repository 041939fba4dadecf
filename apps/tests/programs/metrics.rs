//! Metrics of running programs, read by `wirepath metrics`, curl, promtool and Prometheus. The tests need no privilege.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use wirepath_testlab::{Requirement, eventually, require};

use super::show::{GATEWAY, L2FWD, PORTS, Program, WAIT_LIMIT};

const CURL: Requirement = Requirement::Program("curl");
/// Any free port of the loopback interface.
const METRICS: &str = "metrics = '127.0.0.1:0'";
const OPENMETRICS: &str = "Accept: application/openmetrics-text; version=1.0.0";

/// Returns the address of a program's metrics.
fn address(program: &Program) -> String {
    let status = program.ask(&["{\"request\": \"status\"}"]).remove(0);
    status["metrics"].as_str().unwrap().to_owned()
}

/// Returns standard output of a program.
fn output(command: &[&str]) -> String {
    let output = Command::new(command[0]).args(&command[1..]).stdin(Stdio::null()).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

/// Returns head and body of an answer.
fn curl(program: &Program, path: &str, arguments: &[&str]) -> (String, String) {
    let url = format!("http://{}{path}", address(program));
    let answer = output(&[&["curl", "-s", "-i", "-m", "30"], arguments, &[&url]].concat());
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    (head.to_owned(), body.to_owned())
}

/// Returns the samples: name with labels, and value.
fn samples(text: &str) -> BTreeMap<String, String> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let samples = lines.map(|line| line.rsplit_once(' ').map(|(name, value)| (name.to_owned(), value.to_owned())));
    let count = text.lines().filter(|line| !line.starts_with('#')).count();
    let samples: BTreeMap<_, _> = samples.collect::<Option<_>>().unwrap();
    assert_eq!(samples.len(), count, "each sample is there once");
    samples
}

fn plain(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// Compares the samples of a table with its rows. Returns the number of compared samples.
fn compare(program: &Program, samples: &BTreeMap<String, String>, table: &str, metric: &str) -> usize {
    let tables = program.ask(&["{\"request\": \"tables\"}"]).remove(0);
    let spec = tables["tables"].as_array().unwrap().iter().find(|spec| spec["name"] == table).unwrap();
    let columns = spec["columns"].as_array().unwrap();
    let mut compared = 0;
    for row in program.rows(&[table]) {
        let keys =
            columns.iter().filter(|column| column["kind"] == "key").map(|column| column["name"].as_str().unwrap());
        let labels: Vec<String> = keys.map(|key| format!("{key}=\"{}\"", plain(&row[key]))).collect();
        let labels = if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) };
        for column in columns {
            let name = column["name"].as_str().unwrap();
            let suffix = match column["kind"].as_str().unwrap() {
                "counter" => "_total",
                "gauge" => "",
                _ => continue,
            };
            let sample = samples.get(&format!("wirepath_{metric}_{name}{suffix}{labels}"));
            // Polls without packets go on.
            if name == "empty" {
                assert!(sample.is_some(), "{metric} {name} {labels}");
                continue;
            }
            assert_eq!(sample.cloned().unwrap_or_default(), plain(&row[name]), "{metric} {name} {labels}");
            compared += 1;
        }
    }
    compared
}

#[test]
fn metrics_show_and_summary_have_equal_totals() {
    require!(CURL);
    let config = PORTS.replace("flows = 100", "flows = 100\ncount = 40000")
        + "[[rule]]\nrule = 'ingress prio 1: port id east / udp src 1024 => drop'\n";
    let program = Program::start_with(L2FWD, &config, METRICS);
    let mut last = Value::Null;
    assert!(eventually(WAIT_LIMIT, || {
        let now = program.rows(&["balance"])[0].clone();
        std::mem::replace(&mut last, now.clone()) == now && now["received"] == 80_000 && now["in_flight"] == 0
    }));
    let (code, text) = program.wirepath(&["metrics"]);
    assert_eq!(code, Some(0), "{text}");
    let (_, by_http) = curl(&program, "/metrics", &["-H", OPENMETRICS]);
    assert!(by_http.ends_with("\n# EOF\n") && !text.contains("# EOF"), "{by_http}");
    let (text, by_http) = (samples(&text), samples(&by_http));
    for (table, metric, least) in [
        ("ports", "port", 20),
        ("queues", "queue", 28),
        ("drops", "drop", 1),
        ("balance", "packets", 8),
        ("memory", "pool", 4),
    ] {
        for samples in [&text, &by_http] {
            assert!(compare(&program, samples, table, metric) >= least, "{table}");
        }
    }
    assert_eq!(compare(&program, &text, "rules", "rule"), 2);
    assert_eq!(text["wirepath_metrics_rows_left_out{table=\"ports\"}"], "0");
    assert!(text.keys().any(|name| name.starts_with("wirepath_worker_turns_total{worker=\"0\"}")));
    let info = "wirepath_port_info{port=\"east\",driver=\"null\",device=";
    assert!(text.keys().any(|name| name.starts_with(info) && name.contains("state=\"up\"")), "{text:?}");
    assert!(text.keys().any(|name| name.starts_with("wirepath_program_info{program=\"l2fwd\",release=")));
    let summary = program.stop();
    let sum = |prefix: &str| -> u64 {
        text.iter().filter(|(name, _)| name.starts_with(prefix)).map(|(_, value)| value.parse::<u64>().unwrap()).sum()
    };
    for key in ["rx_packets", "rx_bytes", "tx_packets", "tx_bytes"] {
        assert_eq!(sum(&format!("wirepath_port_{key}_total{{")), summary[key].as_u64().unwrap(), "{key}");
    }
    let drops: u64 = summary["drops"].as_object().unwrap().values().map(|n| n.as_u64().unwrap()).sum();
    assert!(drops > 0 && sum("wirepath_drop_packets_total{") == drops, "{drops}");
}

#[test]
fn names_and_syntax_are_those_of_prometheus() {
    require!(Requirement::Program("promtool"));
    let program = Program::start(L2FWD, PORTS);
    let (_, text) = program.wirepath(&["metrics"]);
    let mut promtool = Command::new("promtool");
    promtool.args(["check", "metrics"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut promtool = promtool.spawn().unwrap();
    promtool.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let output = promtool.wait_with_output().unwrap();
    let complaints = String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && complaints.is_empty(), "{complaints}");
    // The path of the configuration has all characters that have escapes.
    let escaped = |text: &str| {
        let info = text.lines().find(|line| line.starts_with("wirepath_program_info{")).unwrap_or_default();
        info.contains("/a\\\\b \\\"c\\n") && info.ends_with("/config.toml\"} 1")
    };
    assert!(escaped(&text), "{text}");
    let (code, text) = program.wirepath(&["metrics", "--openmetrics", "--json"]);
    let text: Value = serde_json::from_str(&text).unwrap();
    assert!(code == Some(0) && escaped(text["text"].as_str().unwrap()), "{text}");
    let answer = program.ask(&["{\"request\": \"metrics\", \"format\": \"xml\"}"]).remove(0);
    assert_eq!(answer["error"], "format: expected \"openmetrics\" or \"prometheus\"");
}

#[test]
fn http_requests_are_answered_or_refused() {
    require!(CURL);
    // The address needs no control socket, but the test does.
    let program = Program::start_with(L2FWD, PORTS, METRICS);
    let (head, body) = curl(&program, "/metrics", &[]);
    assert!(
        head.starts_with("HTTP/1.1 200 OK\r\n") && body.starts_with("# TYPE wirepath_program_info gauge\n"),
        "{head}"
    );
    assert!(head.contains("\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"), "{head}");
    assert!(head.contains(&format!("\r\nContent-Length: {}\r\n", body.len())), "{head}");
    let (head, body) = curl(&program, "/metrics", &["-H", OPENMETRICS]);
    assert!(body.starts_with("# TYPE wirepath_program info\n"), "{body}");
    let kind = "\r\nContent-Type: application/openmetrics-text; version=1.0.0; charset=utf-8\r\n";
    assert!(head.contains(kind) && head.contains("\r\nConnection: close"), "{head}");
    let (head, body) = curl(&program, "/metrics", &["--head"]);
    assert!(
        head.starts_with("HTTP/1.1 200 ") && body.is_empty() && !head.contains("Content-Length: 0"),
        "{head} {body}"
    );
    for (path, arguments, status) in [
        ("/", &[][..], "404"),
        ("/metrics", &["-d", "x=1"], "405"),
        ("/metrics", &["-X", "DELETE"], "405"),
        ("/metrics", &["-0"], "200"),
        ("/metrics?name=x", &[], "200"),
    ] {
        let (head, _) = curl(&program, path, arguments);
        assert_eq!(head.split(' ').nth(1), Some(status), "{path} {arguments:?}: {head}");
    }
    // The thread ends with the program, although a client is connected.
    let _client = TcpStream::connect(address(&program)).unwrap();
    program.stop();
}

#[test]
fn hostile_http_clients_delay_nobody() {
    require!(CURL);
    let program = Program::start_with(L2FWD, PORTS, METRICS);
    let address = address(&program);
    let connect = || TcpStream::connect(&address).unwrap();
    // A request without an end.
    let mut huge = connect();
    let _ = huge.write_all(&[b"GET /metrics HTTP/1.1\r\nX: ".to_vec(), vec![b'x'; 64 << 10]].concat());
    let _ = huge.shutdown(Shutdown::Write);
    let mut answer = String::new();
    huge.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 431 "), "{answer}");
    // A slow request ends after five seconds.
    let started = Instant::now();
    let mut slow = connect();
    slow.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    let closed = eventually(WAIT_LIMIT, || slow.write_all(b"G").is_err() || slow.read(&mut [0]).is_ok_and(|n| n == 0));
    assert!(closed && started.elapsed() >= Duration::from_secs(4), "{:?}", started.elapsed());
    // A thousand connections that ask nothing. Most are refused, and a client that asks is served after a second.
    let mut flood: Vec<TcpStream> = (0..1000).map(|_| connect()).collect();
    let refused = |stream: &mut TcpStream| {
        stream.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
        match stream.peek(&mut [0]) {
            Ok(_) => true,
            Err(error) => !matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut),
        }
    };
    assert!(eventually(WAIT_LIMIT, || curl(&program, "/metrics", &[]).0.starts_with("HTTP/1.1 200")));
    let open = flood.iter_mut().filter_map(|stream| (!refused(stream)).then_some(())).count();
    assert!(open <= 16, "{open} connections are open");
    // Clients that ask at once and never read do not stop the program or the socket.
    let mut deaf: Vec<TcpStream> = (0..16).map(|_| connect()).collect();
    deaf.iter_mut().for_each(|stream| drop(stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n")));
    let received = || program.rows(&["balance"])[0]["received"].as_u64().unwrap();
    let before = received();
    assert!(eventually(WAIT_LIMIT, || received() > before));
    assert!(eventually(WAIT_LIMIT, || curl(&program, "/metrics", &[]).0.starts_with("HTTP/1.1 200")));
    program.stop();
}

#[test]
fn an_address_in_use_is_refused_as_by_the_start() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.toml");
    let address = taken.local_addr().unwrap();
    std::fs::write(&file, format!("{PORTS}[control]\nsocket = 'off'\nmetrics = '{address}'\n")).unwrap();
    for arguments in [&["--check"][..], &["--seconds", "1"]] {
        let output = Command::new(L2FWD).args(arguments).arg("--config").arg(&file).output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        let found = text.contains(&format!("{address}: Address already in use"));
        assert!(output.status.code() == Some(2) && found, "{text}");
    }
    drop(taken);
    let output = Command::new(L2FWD).arg("--check").arg("--config").arg(&file).output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

/// A Prometheus that reads one program each second. It is killed at the end.
struct Prometheus {
    folder: tempfile::TempDir,
    child: Child,
    url: String,
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Prometheus {
    fn start(target: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let config = folder.path().join("prometheus.yml");
        let job = format!("- job_name: wirepath\n  static_configs:\n  - targets: ['{target}']\n");
        std::fs::write(&config, format!("global:\n  scrape_interval: 1s\nscrape_configs:\n{job}")).unwrap();
        let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let mut command = Command::new("prometheus");
        command.arg(format!("--config.file={}", config.display()));
        command.arg(format!("--storage.tsdb.path={}", folder.path().join("data").display()));
        command.arg(format!("--web.listen-address={free}"));
        let log = std::fs::File::create(folder.path().join("log")).unwrap();
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().unwrap();
        let it = Self { folder, child, url: format!("http://{free}/api/v1") };
        let up = eventually(WAIT_LIMIT, || it.ask("query", &["query=up"])["data"]["result"][0]["value"][1] == "1");
        assert!(up, "{}{}", it.ask("targets", &[]), std::fs::read_to_string(it.folder.path().join("log")).unwrap());
        it
    }

    fn ask(&self, what: &str, arguments: &[&str]) -> Value {
        let url = format!("{}/{what}", self.url);
        let arguments: Vec<&str> = arguments.iter().flat_map(|it| ["--data-urlencode", it]).collect();
        serde_json::from_str(&output(&[&["curl", "-sG", &url], &arguments[..]].concat())).unwrap_or_default()
    }
}

#[test]
fn each_query_of_the_dashboard_has_a_result() {
    require!(CURL, Requirement::Program("prometheus"));
    // The gateway drops what comes from the underlay, because it is not for it.
    let config = PORTS.to_owned()
        + "[underlay]\nport = 'east'\naddresses = ['10.9.0.1/24']\n[[segment]]\nname = 'blue'\nvni = 42\n\
           remotes = ['10.9.0.2']\nports = [{ port = 'west' }]\n";
    let program = Program::start_with(GATEWAY, &config, METRICS);
    let prometheus = Prometheus::start(&address(&program));
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/grafana/wirepath.json");
    let dashboard: Value = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let targets = panels.iter().flat_map(|panel| panel["targets"].as_array().unwrap());
    let queries: Vec<String> = targets.map(|target| target["expr"].as_str().unwrap().to_owned()).collect();
    assert!(queries.len() > 10, "{queries:?}");
    for query in queries {
        let query = query.replace("$__rate_interval", "30s").replace("$instance", ".*");
        let argument = format!("query={query}");
        let mut answer = Value::Null;
        let found = eventually(WAIT_LIMIT, || {
            answer = prometheus.ask("query", &[&argument]);
            let results = answer["data"]["result"].as_array().cloned().unwrap_or_default();
            !results.is_empty() && results.iter().all(|result| result["value"][1] != "NaN")
        });
        assert!(found, "{query}: {answer}");
    }
    // Rates are those of the program: the port receives all the time.
    let rate = prometheus.ask("query", &["query=rate(wirepath_port_rx_packets_total{port=\"east\"}[30s])"]);
    let rate: f64 = rate["data"]["result"][0]["value"][1].as_str().unwrap().parse().unwrap();
    assert!(rate > 1000.0, "{rate}");
    // Prometheus read OpenMetrics, whose types it knows.
    let metadata = prometheus.ask("metadata", &[]);
    for (family, kind) in
        [("wirepath_port", "info"), ("wirepath_port_rx_packets", "counter"), ("wirepath_port_mtu", "gauge")]
    {
        assert_eq!(metadata["data"][family][0]["type"], kind, "{family}");
    }
    assert_eq!(metadata["data"]["wirepath_port_rx_packets"][0]["unit"], "packets");
    program.stop();
}
