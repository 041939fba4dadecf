//! Programs under bad users: outputs that cannot be written, signals at any moment, clients that do not read,
//! files that are pipes. The tests need no privilege, except where they change the user.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use wirepath_nic_emulator::launch;
use wirepath_testlab::{Lab, Requirement, eventually, require};

const L2FWD: &str = env!("CARGO_BIN_EXE_l2fwd");
const GATEWAY: &str = env!("CARGO_BIN_EXE_tunnel-gateway");
const WIREPATH: &str = env!("CARGO_BIN_EXE_wirepath");
/// Generous: other programs may use the processors.
const WAIT_LIMIT: Duration = Duration::from_secs(120);

const PORTS: &str = "[[port]]\nname = 'east'\ndriver = 'null'\n[port.null]\nsource = 'udp4'\n[[port]]\nname = \
                     'west'\ndriver = 'null'\n";

/// A running `l2fwd` with a socket, in a folder of its own. It is killed at the end.
struct Program {
    folder: tempfile::TempDir,
    child: Option<Child>,
}

impl Drop for Program {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Program {
    /// Starts the program. `rules` are the keys of the table `[rules]`.
    fn start(rules: &str, file: Option<&str>, prepare: impl FnOnce(&mut Command)) -> Self {
        Self::start_with("", rules, file, prepare)
    }

    /// Starts the program. `control` are the keys of the table `[control]` besides the socket.
    fn start_with(control: &str, rules: &str, file: Option<&str>, prepare: impl FnOnce(&mut Command)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::set_permissions(&folder, PermissionsExt::from_mode(0o755)).unwrap();
        let config = folder.path().join("l2fwd.toml");
        std::fs::write(&config, format!("{PORTS}[control]\nsocket = 'rules.sock'\n{control}[rules]\n{rules}")).unwrap();
        if let Some(file) = file {
            std::fs::write(folder.path().join("file.rules"), file).unwrap();
        }
        let mut command = Command::new(L2FWD);
        command.arg("--json").arg("--config").arg(config);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        prepare(&mut command);
        let it = Self { folder, child: Some(command.spawn().unwrap()) };
        assert!(eventually(WAIT_LIMIT, || UnixStream::connect(it.socket()).is_ok()), "the program listens");
        it
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("rules.sock")
    }

    fn pid(&self) -> Pid {
        Pid::from_child(self.child.as_ref().unwrap())
    }

    fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).unwrap();
    }

    /// Stops the program and returns its summary.
    fn stop(mut self) -> Value {
        self.signal(Signal::TERM);
        let output = wait(self.child.take().unwrap());
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Waits for the end of a program and kills it if it does not come.
fn wait(mut child: Child) -> Output {
    let pipes = (child.stdout.take(), child.stderr.take());
    std::thread::scope(|scope| {
        let read = |pipe: Option<Box<dyn Read + Send>>| {
            scope.spawn(move || {
                let mut bytes = Vec::new();
                pipe.map(|mut pipe| pipe.read_to_end(&mut bytes));
                bytes
            })
        };
        let stdout = read(pipes.0.map(|pipe| Box::new(pipe) as _));
        let stderr = read(pipes.1.map(|pipe| Box::new(pipe) as _));
        let ended = eventually(WAIT_LIMIT, || child.try_wait().unwrap().is_some());
        if !ended {
            child.kill().unwrap();
        }
        let status = child.wait().unwrap();
        assert!(ended, "the program does not end");
        Output { status, stdout: stdout.join().unwrap(), stderr: stderr.join().unwrap() }
    })
}

/// A client with one connection.
struct Client(BufReader<UnixStream>);

impl Client {
    fn new(socket: &Path) -> Self {
        let stream = wirepath_control_socket::connect(socket, WAIT_LIMIT).unwrap();
        Self(BufReader::new(stream))
    }

    fn ask(&mut self, request: &Value) -> Value {
        self.ask_all(std::slice::from_ref(request)).remove(0)
    }

    /// Sends requests together, and returns their answers.
    fn ask_all(&mut self, requests: &[Value]) -> Vec<Value> {
        let text: String = requests.iter().map(|request| format!("{request}\n")).collect();
        self.0.get_mut().write_all(text.as_bytes()).unwrap();
        let answer = |request: &Value| {
            let mut line = String::new();
            self.0.read_line(&mut line).unwrap();
            serde_json::from_str(&line).unwrap_or_else(|error| panic!("{request}: {error}: {line}"))
        };
        requests.iter().map(answer).collect()
    }

    fn add(&mut self, rule: &str) -> u64 {
        let answer = self.ask(&add(rule));
        answer["id"].as_u64().unwrap_or_else(|| panic!("{rule}: {answer}"))
    }
}

fn add(rule: &str) -> Value {
    json!({ "request": "add", "object": "rule", "arguments": { "rule": rule } })
}

fn remove(id: &Value) -> Value {
    json!({ "request": "remove", "object": "rule", "arguments": { "id": id } })
}

/// Returns the rows of the table of rules: id, rule, packets and others.
fn rule_rows(socket: &Path) -> Vec<Vec<Value>> {
    wirepath::control_socket::Client::connect(socket).unwrap().show("rules", &[], None).unwrap().rows
}

fn rules(socket: &Path) -> Vec<(u64, String)> {
    let rule = |row: Vec<Value>| (row[0].as_u64().unwrap(), row[1].as_str().unwrap().to_owned());
    rule_rows(socket).into_iter().map(rule).collect()
}

/// Runs a program to its end.
fn run(command: &mut Command) -> Output {
    wait(command.spawn().unwrap())
}

fn fifo(path: &Path) {
    let _ = std::fs::remove_file(path);
    rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
}

fn full() -> Stdio {
    File::options().write(true).open("/dev/full").unwrap().into()
}

#[test]
fn a_full_disk_under_the_log_ends_no_program() {
    for binary in [GATEWAY, L2FWD] {
        let mut command = Command::new(binary);
        command.args(["--seconds", "1", "--json", "-v"]).stdout(Stdio::piped()).stderr(full());
        let output = run(&mut command);
        assert_eq!(output.status.code(), Some(0), "{binary}");
        let summary: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert!(summary["lost_lines"].as_u64().unwrap() > 0, "{summary}");
        // Live rates cannot be written either. The result is lost, which is a failure and no panic.
        let mut command = Command::new(binary);
        let output = run(command.args(["--seconds", "2"]).stdout(full()).stderr(Stdio::piped()));
        assert_eq!(output.status.code(), Some(1), "{binary}: {}", text(&output.stderr));
        assert!(text(&output.stderr).contains("error: standard output: No space left"), "{}", text(&output.stderr));
    }
}

#[test]
fn a_log_that_nobody_reads_holds_no_program() {
    // Each change is one line of the log. They exceed the pipe and the queue.
    const BATCHES: usize = 25;
    const BATCH: usize = 400;
    let mut program = Program::start("", None, |command| {
        command.stderr(Stdio::piped());
    });
    let mut client = Client::new(&program.socket());
    for _ in 0..BATCHES {
        let rule = |n| format!("ingress prio 9: port id west / ipv4 dst 10.0.0.1 / udp dst {n} => count, drop");
        let added = client.ask_all(&(0..BATCH).map(|n| add(&rule(n))).collect::<Vec<_>>());
        let removals: Vec<Value> = added.iter().map(|answer| remove(&answer["id"])).collect();
        assert!(client.ask_all(&removals).iter().all(|answer| *answer == json!({ "ok": true })));
    }
    let unread = program.child.as_mut().unwrap().stderr.take();
    let summary = program.stop();
    assert!(summary["lost_lines"].as_u64().unwrap() > 100, "{summary}");
    drop(unread);
}

#[test]
fn a_closed_log_and_display_end_no_program() {
    for json in [true, false] {
        let mut command = Command::new(GATEWAY);
        command.args(["--seconds", "2", "-v"]).args(json.then_some("--json"));
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stderr.take());
        if !json {
            drop(child.stdout.take());
        }
        let output = wait(child);
        assert_eq!(output.status.code(), Some(0));
        if json {
            let summary: Value = serde_json::from_slice(&output.stdout).unwrap();
            assert!(summary["lost_lines"].as_u64().unwrap() > 0, "{summary}");
        }
    }
}

/// Opens a terminal: its master and its slave.
pub(super) fn terminal() -> (OwnedFd, File) {
    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
    grantpt(&master).unwrap();
    unlockpt(&master).unwrap();
    let name = ptsname(&master, Vec::new()).unwrap();
    (master, File::options().read(true).write(true).open(name.to_str().unwrap()).unwrap())
}

#[test]
fn a_terminal_that_hangs_up_ends_no_program() {
    require!(Requirement::Program("setsid"));
    let (master, slave) = terminal();
    let watched = slave.try_clone().unwrap();
    let program = Program::start("", None, |command| {
        let arguments: Vec<_> = command.get_args().map(ToOwned::to_owned).collect();
        // `setsid` makes the terminal the controlling one, and executes the program.
        *command = Command::new("setsid");
        command.arg("--ctty").arg(L2FWD).args(arguments).stdin(slave.try_clone().unwrap());
        command.stdout(Stdio::piped()).stderr(slave);
    });
    let mut client = Client::new(&program.socket());
    client.add("ingress prio 9: port id west / udp dst 7 => drop");
    drop(master);
    // Processes that other tests start at this moment hold the terminal until they execute their programs.
    let mut poll = [PollFd::new(&watched, PollFlags::empty())];
    rustix::event::poll(&mut poll, None).unwrap();
    assert!(poll[0].revents().contains(PollFlags::HUP));
    // The log of these changes goes nowhere.
    for port in 8..20 {
        client.add(&format!("ingress prio 9: port id west / udp dst {port} => drop"));
    }
    let summary = program.stop();
    assert!(summary["lost_lines"].as_u64().unwrap() >= 12, "{summary}");
    assert_eq!(summary["app"]["rules"].as_array().unwrap().len(), 13);
}

/// Returns whether a process has a handler for SIGHUP (proc(5), `SigCgt`).
fn handles_hangup(pid: Pid) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{}/status", pid.as_raw_pid())).unwrap_or_default();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap_or("0");
    u64::from_str_radix(caught.trim(), 16).unwrap_or(0) & 1 != 0
}

#[test]
fn hangups_end_no_program_at_any_moment() {
    for binary in [GATEWAY, L2FWD] {
        for round in 0..5 {
            let mut command = Command::new(binary);
            command.args(["--seconds", "600", "--json"]).stdout(Stdio::piped()).stderr(Stdio::null());
            let child = command.spawn().unwrap();
            let pid = Pid::from_child(&child);
            assert!(eventually(WAIT_LIMIT, || handles_hangup(pid)), "{binary} handles SIGHUP");
            // The ports open meanwhile.
            for _ in 0..200 + 50 * round {
                kill_process(pid, Signal::HUP).unwrap();
                std::thread::sleep(Duration::from_micros(500));
            }
            // The handler of SIGTERM comes later.
            let caught = |pid: Pid| {
                let status = std::fs::read_to_string(format!("/proc/{}/status", pid.as_raw_pid())).unwrap();
                let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap().trim().to_owned();
                u64::from_str_radix(&caught, 16).unwrap() >> 14 & 1 != 0
            };
            assert!(eventually(WAIT_LIMIT, || caught(pid)));
            kill_process(pid, Signal::TERM).unwrap();
            let output = wait(child);
            assert_eq!(output.status.code(), Some(0), "{binary}");
            serde_json::from_slice::<Value>(&output.stdout).expect("a summary");
        }
    }
}

#[test]
fn ids_stay_while_the_file_is_read_again() {
    const CLIENTS: usize = 8;
    const RULES: usize = 60;
    let of_file = |n: usize| format!("ingress prio 7: port id west / ipv4 / udp src {n} => drop");
    let file = |n: usize| (n..n + 20).map(|n| of_file(n) + "\n").collect::<String>();
    let program = Program::start("file = 'file.rules'\n", Some(&file(1)), |_| {});
    let socket = program.socket();
    let path = program.folder.path().join("file.rules");
    let working = AtomicUsize::new(CLIENTS);
    let ids: Vec<u64> = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS)
            .map(|number| {
                let (socket, working) = (&socket, &working);
                scope.spawn(move || {
                    let mut client = Client::new(socket);
                    let rule = |n| format!("ingress prio 7: port id west / ipv4 dst 10.0.{number}.{n} => drop");
                    let mut all = Vec::new();
                    for half in 0..2 {
                        let ids: Vec<u64> = (0..RULES).map(|n| client.add(&rule(half * RULES + n))).collect();
                        for id in &ids {
                            assert_eq!(client.ask(&remove(&json!(id))), json!({ "ok": true }));
                            assert_eq!(client.ask(&remove(&json!(id)))["ok"], false, "gone");
                        }
                        all.extend(ids);
                    }
                    working.fetch_sub(1, Ordering::SeqCst);
                    all
                })
            })
            .collect();
        let mut round = 1;
        while working.load(Ordering::SeqCst) > 0 {
            // The rules of the file are others each time, before and between those of the clients.
            round = round % 50 + 1;
            let new = path.with_extension("new");
            std::fs::write(&new, file(round)).unwrap();
            std::fs::rename(&new, &path).unwrap();
            program.signal(Signal::HUP);
            std::thread::sleep(Duration::from_millis(10));
        }
        clients.into_iter().flat_map(|client| client.join().unwrap()).collect()
    });
    let mut unique = ids.clone();
    unique.sort_unstable();
    unique.dedup();
    assert_eq!(unique.len(), 2 * CLIENTS * RULES, "no id was given twice");
    std::fs::write(&path, file(500)).unwrap();
    program.signal(Signal::HUP);
    let texts = || rules(&socket).into_iter().map(|(_, text)| text).collect::<Vec<_>>();
    let expected: Vec<String> = (500..520).map(of_file).collect();
    assert!(eventually(WAIT_LIMIT, || texts() == expected), "{:?}", texts());
    program.stop();
}

#[test]
fn rules_that_stay_keep_their_ids_and_counters() {
    let program = Program::start(
        "file = 'file.rules'\n[[rule]]\nrule = 'ingress prio 7: port id west => drop'\n",
        Some("ingress prio 7: port id east / udp => count\ningress prio 7: port id east / tcp => count\n"),
        |_| {},
    );
    let socket = program.socket();
    let by_client = Client::new(&socket).add("ingress prio 7: port id east / icmp => drop");
    let counted = |id: u64| {
        let rows = rule_rows(&socket);
        let row = rows.iter().find(|row| row[0] == id);
        row.unwrap_or_else(|| panic!("{id} in {rows:?}"))[2].as_u64().unwrap()
    };
    let before = rules(&socket);
    let udp = before[1].0;
    assert!(eventually(WAIT_LIMIT, || counted(udp) > 1000));
    // A rule comes first, the others move.
    let at_least = counted(udp);
    let path = program.folder.path().join("file.rules");
    let file = "ingress prio 7: port id east / ipv4 dst 10.9.9.9 => drop\ningress prio 7: port id east / tcp => count\n\
                ingress prio 7: port id east / udp => count\n";
    std::fs::write(&path, file).unwrap();
    program.signal(Signal::HUP);
    assert!(eventually(WAIT_LIMIT, || rules(&socket).len() == 5));
    let after = rules(&socket);
    let ids: Vec<u64> = after.iter().map(|it| it.0).collect();
    assert_eq!(ids, [before[0].0, ids[1], before[2].0, udp, by_client], "{before:?} {after:?}");
    assert!(!before.iter().any(|it| it.0 == ids[1]), "the new rule has a new id");
    let now = counted(udp);
    assert!(now >= at_least, "{at_least} before, {now} after");
    assert!(eventually(WAIT_LIMIT, || counted(udp) > now), "it goes on counting");
    // A rule that leaves the file and comes back is another rule.
    std::fs::write(&path, "").unwrap();
    program.signal(Signal::HUP);
    assert!(eventually(WAIT_LIMIT, || rules(&socket).len() == 2));
    std::fs::write(&path, file).unwrap();
    program.signal(Signal::HUP);
    assert!(eventually(WAIT_LIMIT, || rules(&socket).len() == 5));
    assert!(rules(&socket)[1..4].iter().all(|it| !ids.contains(&it.0)));
    program.stop();
}

/// Rules of a long list.
const MANY: usize = 100_000;
/// Reads after which a slow reader gives up: minutes at its pace, and a small part of a list of [`MANY`] rules.
const READS: usize = 6000;

fn many_rules() -> String {
    let rule = |n: usize| {
        format!("ingress prio 7: port id 1 / ipv4 dst 10.{}.{}.{} => drop\n", n >> 16, n >> 8 & 255, n & 255)
    };
    (0..MANY).map(rule).collect()
}

/// Starts clients that read lists slowly, and return the number of their reads.
fn slow_readers(socket: &Path) -> Vec<std::thread::JoinHandle<usize>> {
    let start = |_| {
        let mut stream = wirepath_control_socket::connect(socket, WAIT_LIMIT).unwrap();
        stream.write_all(b"{\"request\": \"show\", \"table\": \"rules\"}\n").unwrap();
        std::thread::spawn(move || {
            let mut count = 0;
            while count < READS && matches!(stream.read(&mut [0; 2048]), Ok(n) if n > 0) {
                count += 1;
                std::thread::sleep(Duration::from_millis(20));
            }
            count
        })
    };
    (0..16).map(start).collect()
}

#[test]
fn a_slow_reader_delays_no_ping() {
    require!(all Requirement::LAB, Requirement::Program("ping"));
    let lab = Lab::new("slow");
    let (gateway, peer) = (lab.namespace("gateway"), lab.namespace("peer"));
    lab.veth((&gateway, "wan"), (&peer, "eth0"));
    peer.ip("address add 10.9.0.2/24 dev eth0");
    let folder = tempfile::tempdir().unwrap();
    let (config, socket) = (folder.path().join("gateway.toml"), folder.path().join("rules.sock"));
    let text = "[[port]]\nname = 'wan'\ndriver = 'af_packet'\ndevice = 'wan'\n[[port]]\nname = 'lan'\ndriver = 'null'\n\
                [underlay]\nport = 'wan'\naddresses = ['10.9.0.1/24']\n[[segment]]\nname = 'blue'\nvni = 42\n\
                remotes = ['10.9.0.2']\nports = [{ port = 'lan' }]\n\
                [control]\nsocket = 'rules.sock'\n[rules]\nfile = 'file.rules'\n";
    std::fs::write(&config, text).unwrap();
    std::fs::write(folder.path().join("file.rules"), many_rules()).unwrap();
    let program = gateway.spawn(&[GATEWAY, "--json", "--config", config.to_str().unwrap()]);
    assert!(eventually(WAIT_LIMIT, || UnixStream::connect(&socket).is_ok()), "the program listens");
    // The gateway answers ARP and pings by its control thread.
    let ping = ["ping", "-c", "20", "-i", "0.05", "-W", "30", "10.9.0.1"];
    assert!(eventually(WAIT_LIMIT, || peer.run(&ping).success));
    let readers = slow_readers(&socket);
    let output = peer.run(&ping).expect();
    assert!(output.contains("20 received"), "{output}");
    assert!(readers.iter().all(|reader| !reader.is_finished()), "the readers still read");
    let outcome = program.terminate(WAIT_LIMIT);
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    assert!(readers.into_iter().all(|reader| reader.join().unwrap() < READS), "the end of the program ends them");
}

#[test]
fn a_slow_reader_holds_nobody() {
    let program = Program::start("file = 'file.rules'\n", Some(&many_rules()), |_| {});
    let socket = program.socket();
    let readers = slow_readers(&socket);
    // Others are served long before the slow readers have their lists, for which they have 60 s.
    let mut client = Client::new(&socket);
    let ids: Vec<u64> =
        (1..16).map(|n| client.add(&format!("ingress prio 9: port id east / udp dst {n} => count"))).collect();
    for id in ids {
        assert_eq!(client.ask(&remove(&json!(id))), json!({ "ok": true }));
    }
    assert!(readers.iter().all(|reader| !reader.is_finished()), "the readers still read");
    let whole = rules(&socket);
    assert_eq!((whole.len(), whole[MANY - 1].1.contains("10.1.134.159")), (MANY, true));
    let summary = program.stop();
    assert!(summary["rx_packets"].as_u64().unwrap() > 1000, "{}", summary["rx_packets"]);
    assert!(readers.into_iter().all(|reader| reader.join().unwrap() < READS), "the end of the program ends them");
}

#[test]
fn a_pipe_as_rules_file_holds_nobody() {
    let program = Program::start("file = 'file.rules'\n", Some("ingress: port id west => drop\n"), |command| {
        command.stderr(Stdio::piped());
    });
    let (socket, path) = (program.socket(), program.folder.path().join("file.rules"));
    fifo(&path);
    program.signal(Signal::HUP);
    // The program still answers, and still reads the file when it is one again.
    let mut client = Client::new(&socket);
    for n in 1..50 {
        client.add(&format!("ingress prio 9: port id east / udp dst {n} => count"));
    }
    assert_eq!(rules(&socket).len(), 50);
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, "ingress: port id west => drop\ningress: port id west / udp => drop\n").unwrap();
    program.signal(Signal::HUP);
    assert!(eventually(WAIT_LIMIT, || rules(&socket).len() == 51));
    // At the start, a pipe is an error.
    fifo(&path);
    let mut command = Command::new(L2FWD);
    command.arg("--config").arg(program.folder.path().join("l2fwd.toml"));
    let output = run(command.stderr(Stdio::piped()));
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("file.rules: cannot read this"), "{}", text(&output.stderr));
    program.stop();
}

#[test]
fn a_thousand_clients_and_endless_ones() {
    let program = Program::start("", None, |_| {});
    let socket = program.socket();
    // Clients that say nothing, or half of a request.
    let silent: Vec<UnixStream> = (0..1000)
        .map(|n| {
            let mut stream = wirepath_control_socket::connect(&socket, WAIT_LIMIT).unwrap();
            if n % 2 == 0 {
                // The program may have closed the connection to make room.
                let _ = stream.write_all(b"{\"request\": \"add");
            }
            stream
        })
        .collect();
    let id = Client::new(&socket).add("ingress prio 9: port id west / udp dst 7 => drop");
    assert!(silent.len() == 1000, "they are still there");
    // A request of a gibibyte.
    let mut stream = wirepath_control_socket::connect(&socket, WAIT_LIMIT).unwrap();
    let part = vec![b'x'; 1 << 20];
    let accepted = (0..1024).take_while(|_| stream.write_all(&part).is_ok()).count();
    assert!(accepted < 64, "{accepted} MiB");
    let mut answer = String::new();
    let _ = BufReader::new(stream).read_line(&mut answer);
    assert!(answer.contains("a request has at most 65536 bytes"), "{answer}");
    // A thousand clients that all want something. One that is slow to ask may have to ask again.
    let add_to = |socket: &Path, rule: &Value| loop {
        let mut stream = wirepath_control_socket::connect(socket, WAIT_LIMIT).unwrap();
        let mut line = String::new();
        if stream.write_all(format!("{rule}\n").as_bytes()).is_ok()
            && BufReader::new(stream).read_line(&mut line).is_ok_and(|bytes| bytes > 0)
        {
            let answer: Value = serde_json::from_str(&line).unwrap();
            return answer["id"].as_u64().unwrap_or_else(|| panic!("{rule}: {answer}"));
        }
    };
    let threads: Vec<_> = (0..1000)
        .map(|n| {
            let socket = socket.clone();
            let rule = format!("ingress prio 9: port id west / ipv4 dst 10.0.{}.{} => drop", n / 200, n % 200);
            let add = move || add_to(&socket, &add(&rule));
            std::thread::Builder::new().stack_size(256 << 10).spawn(add).unwrap()
        })
        .collect();
    let mut ids: Vec<u64> = threads.into_iter().map(|thread| thread.join().unwrap()).chain([id]).collect();
    ids.sort_unstable();
    let mut listed: Vec<u64> = rules(&socket).into_iter().map(|(id, _)| id).collect();
    listed.sort_unstable();
    assert_eq!(listed, ids);
    drop(silent);
    program.stop();
}

#[test]
fn the_socket_of_another_program_stays() {
    let program = Program::start("", None, |_| {});
    let socket = program.socket();
    let folder = tempfile::tempdir().unwrap();
    let kept = folder.path().join("rules.sock");
    std::fs::remove_file(&socket).unwrap();
    let other = UnixListener::bind(&socket).unwrap();
    // The folder of the program goes with it, so the socket is moved by a link.
    std::fs::hard_link(&socket, &kept).unwrap();
    let mut program = program;
    program.signal(Signal::TERM);
    let output = wait(program.child.take().unwrap());
    assert_eq!(output.status.code(), Some(0));
    assert!(socket.exists() && UnixStream::connect(&socket).is_ok(), "it belongs to another program now");
    drop(other);
}

#[test]
fn who_may_look_and_who_may_change() {
    require!(Requirement::Root);
    const NOBODY: u32 = 65_534;
    let as_nobody = |arguments: &[&str], socket: &Path| {
        let mut command = Command::new(WIREPATH);
        command.arg("flow").args(arguments).arg("--socket").arg(socket).uid(NOBODY).gid(NOBODY);
        let output = command.output().unwrap();
        (output.status.code(), text(&output.stdout) + &text(&output.stderr))
    };
    let add = ["add", "ingress prio 9: port id west / udp dst 7 => drop"];
    let program = Program::start("", None, |command| {
        command.stderr(Stdio::piped());
    });
    let mode = std::fs::metadata(program.socket()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let (code, error) = as_nobody(&["list"], &program.socket());
    assert!(code == Some(1) && error.contains("Permission denied"), "{error}");
    program.stop();

    let program = Program::start_with("mode = 0o666\n", "", None, |_| {});
    assert_eq!(as_nobody(&["list"], &program.socket()).0, Some(0));
    let (code, error) = as_nobody(&add, &program.socket());
    assert!(code == Some(2) && error.contains("user 65534 may not change this program"), "{error}");
    assert!(rules(&program.socket()).is_empty());
    program.stop();

    let log = tempfile::NamedTempFile::new().unwrap();
    let keys = format!("mode = 0o660\ngroup = '{NOBODY}'\nchange = 'group'\n");
    let program = Program::start_with(&keys, "", None, |command| {
        command.stderr(log.reopen().unwrap());
    });
    assert_eq!(as_nobody(&add, &program.socket()), (Some(0), "0\n".to_owned()));
    assert_eq!(as_nobody(&["remove", "0"], &program.socket()).0, Some(0));
    program.stop();
    let log = std::fs::read_to_string(log.path()).unwrap();
    for change in ["rule 0 added by uid 65534, pid ", "rule 0 removed by uid 65534, pid "] {
        assert!(log.contains(change), "{log}");
    }
}

#[test]
fn every_tool_refuses_the_list_that_the_start_refuses() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("l2fwd.toml");
    let masks: String = (0..129)
        .map(|n| {
            format!(
                "[[rule]]\nrule = 'ingress prio 1: ipv4 src 10.0.0.0/{} dst 10.0.0.0/{} => drop'\n",
                9 + n % 12,
                9 + n / 12
            )
        })
        .collect();
    let same = "[[rule]]\nrule = 'ingress prio 1: udp dst 7 => drop'\n".repeat(65);
    for (rules, why) in [
        (masks.as_str(), "rule[128].rule: the limit of 128 masks per direction is reached"),
        (&same, "rule[64].rule: the limit of 64 rules with the same pattern is reached"),
        ("[[rule]]\nrule = 'ingress: any => queue 2'\n", "rule[0].rule: port \"east\" has no queue 2; it has 1"),
        ("[[rule]]\nrule = 'ingress: any => kernel'\n", "\"kernel\" cannot be done on port \"east\" (driver null)"),
    ] {
        std::fs::write(&config, format!("{PORTS}{rules}")).unwrap();
        for (binary, arguments) in [
            (L2FWD, &["--config"][..]),
            (L2FWD, &["--check", "--config"]),
            (WIREPATH, &["flow", "check"]),
            (WIREPATH, &["flow", "explain"]),
        ] {
            let output = Command::new(binary).args(arguments).arg(&config).output().unwrap();
            let all = text(&output.stderr) + &text(&output.stdout);
            assert_eq!(output.status.code(), Some(2), "{arguments:?}: {all}");
            let why =
                if arguments.contains(&"explain") { why.split_once("rule: ").map_or(why, |it| it.1) } else { why };
            assert!(all.contains(why), "{arguments:?}: {all}");
        }
    }
}

#[test]
fn a_pipe_as_capabilities_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (pipe, config) = (folder.path().join("nic.json"), folder.path().join("l2fwd.toml"));
    fifo(&pipe);
    std::fs::write(&config, PORTS).unwrap();
    let mut command = Command::new(WIREPATH);
    command.args(["flow", "explain"]).arg(&config).arg("--capabilities").arg(&pipe);
    let output = run(command.stderr(Stdio::piped()));
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("nic.json: cannot read this configuration: expected a regular file"));
}

#[test]
fn a_killed_emulate_leaves_no_program() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("nics.toml"), "[[device]]\nkind = 'mana'\n[[device.port]]\n").unwrap();
    let mut command = Command::new(WIREPATH);
    command.env(launch::PRELOAD, launch::build_library());
    command.args(["emulate", "--topology", "nics.toml", "--", "cat"]).current_dir(&folder);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    // The program runs once it returns a byte.
    let (mut to, mut from) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    to.write_all(b"x").unwrap();
    from.read_exact(&mut [0]).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    // The end of its output is the end of the program: its input is still open.
    assert_eq!(from.read(&mut [0]).unwrap(), 0);
    assert!(to.as_fd().try_clone_to_owned().is_ok());
}

#[test]
fn a_killed_emulate_leaves_no_grandchild() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("nics.toml"), "[[device]]\nkind = 'mana'\n[[device.port]]\n").unwrap();
    // A child of the program, and a process whose own parent has ended.
    let script = "sleep 1000 & echo $!; (sleep 1000 & echo $!); wait";
    let mut command = Command::new(WIREPATH);
    command.env(launch::PRELOAD, launch::build_library());
    command.args(["emulate", "--topology", "nics.toml", "--", "sh", "-c", script]).current_dir(&folder);
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap());
    let mut pids = [String::new(), String::new()];
    for pid in &mut pids {
        lines.read_line(pid).unwrap();
        assert!(Path::new("/proc").join(pid.trim()).exists(), "{pid}");
    }
    child.kill().unwrap();
    child.wait().unwrap();
    // The end of the output is the end of all processes that hold it.
    let watched = std::thread::spawn(move || lines.read_line(&mut String::new()).unwrap());
    let end = Instant::now() + Duration::from_secs(20);
    while !watched.is_finished() && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(10));
    }
    let left: Vec<&String> = pids.iter().filter(|pid| Path::new("/proc").join(pid.trim()).exists()).collect();
    for pid in &left {
        let _ = Command::new("kill").args(["-9", pid.trim()]).status();
    }
    assert!(left.is_empty() && watched.is_finished(), "{left:?}");
}

#[test]
fn a_signal_to_emulate_reaches_the_program() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("nics.toml"), "[[device]]\nkind = 'mana'\n[[device.port]]\n").unwrap();
    let mut command = Command::new(WIREPATH);
    command.env(launch::PRELOAD, launch::build_library());
    let script = "trap 'exit 7' TERM; echo ready; while :; do sleep 0.01; done";
    command.args(["emulate", "--topology", "nics.toml", "--", "sh", "-c", script]).current_dir(&folder);
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n");
    assert!(Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap().success());
    assert_eq!(child.wait().unwrap().code(), Some(7));
}

#[test]
fn the_emulator_deletes_no_file() {
    require!(Requirement::File("/etc/libibverbs.d/mana.driver"));
    let folder = tempfile::tempdir().unwrap();
    let (nics, text_file) = (folder.path().join("nics.toml"), folder.path().join("important"));
    std::fs::write(&nics, "control = 'important'\n[[device]]\nkind = 'mana'\n[[device.port]]\n").unwrap();
    let mut command = Command::new(WIREPATH);
    command.env(launch::PRELOAD, launch::build_library());
    // The file appears when the start has checked the topology, and before the program uses the devices.
    command.args(["emulate", "--topology", "nics.toml", "--", "sh", "-c"]).current_dir(&folder);
    let output = command.arg(format!("echo text > important && {WIREPATH} devices")).output().unwrap();
    let error = text(&output.stderr);
    assert!(
        error.contains("cannot bind the control socket important: there is a file that is not a socket"),
        "{error}"
    );
    assert_eq!(std::fs::read_to_string(&text_file).unwrap(), "text\n");
    // A file that is there at the start is an error.
    let mut command = Command::new(WIREPATH);
    command.env(launch::PRELOAD, launch::build_library());
    let output =
        command.args(["emulate", "--topology", "nics.toml", "--", "true"]).current_dir(&folder).output().unwrap();
    assert!(output.status.code() == Some(2) && text(&output.stderr).contains("control = \"important\""));
    assert_eq!(std::fs::read_to_string(&text_file).unwrap(), "text\n");
}
