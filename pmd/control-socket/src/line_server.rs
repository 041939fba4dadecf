//! Requests and answers of one line each, served by a thread that has other work.
//!
//! One call of [`LineServer::serve`] is a turn. It never blocks, and it ends after a bounded time and number of
//! bytes, whatever the clients do. A long answer is made in parts: the next part is made when the client has read
//! the last one. So no client makes the server store more than one part.

use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::RecvFlags;

use crate::listener::{Listener, Peer};

/// Limits of a [`LineServer`].
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections at a time. A new one takes the place of the one that has asked nothing for the longest time.
    pub clients: usize,
    /// Bytes of a request.
    pub request_bytes: usize,
    /// Time from the first byte of a request to its end.
    pub request_time: Duration,
    /// Time that a connection may stay without a request.
    pub idle_time: Duration,
    /// Time from the end of a request to the end of its answer, which the client must read.
    pub answer_time: Duration,
    /// Bytes that one turn reads, and bytes that it writes.
    pub turn_bytes: usize,
    /// Time after which a turn begins no other step. The first step of a turn has no limit.
    pub turn_time: Duration,
}

impl Default for Limits {
    /// 64 clients, requests of 64 KiB, turns of 256 KiB and 2 ms.
    fn default() -> Self {
        Self {
            clients: 64,
            request_bytes: 64 << 10,
            request_time: Duration::from_secs(5),
            idle_time: Duration::from_secs(10),
            answer_time: Duration::from_secs(60),
            turn_bytes: 256 << 10,
            turn_time: Duration::from_millis(2),
        }
    }
}

/// Time that a connection without a request has at least, even if others wait.
const MIN_TIME: Duration = Duration::from_secs(1);
/// Connections that one turn accepts.
const ACCEPTS: usize = 64;

/// Progress of an answer. `R` is the state of an answer of which parts are still to be made.
#[derive(Debug)]
pub enum Answer<R> {
    /// The answer is complete.
    Done,
    /// The next part can be made at once.
    More(R),
    /// The next part is made in a later turn, when there is something to report. The answer has no time limit. It
    /// ends when the client closes the connection.
    Later(R),
    /// The connection leaves the server when the client has read the answer so far: see [`Service::take`].
    HandOver(R),
}

/// The program's part of a [`LineServer`].
pub trait Service {
    /// State of an answer of which parts are still to be made.
    type Rest;

    /// Appends the answer to a request, or its first part, to `out`. The last part ends with a line feed.
    fn answer(&mut self, peer: &Peer, request: &[u8], out: &mut Vec<u8>) -> Answer<Self::Rest>;

    /// Appends the next part of an answer to `out`. A part should have about 16 KiB.
    fn resume(&mut self, rest: Self::Rest, out: &mut Vec<u8>) -> Answer<Self::Rest>;

    /// Takes a connection whose answer is [`Answer::HandOver`], for a thread of its own. The stream does not block. The
    /// default closes it.
    fn take(&mut self, peer: &Peer, rest: Self::Rest, stream: UnixStream) {
        let _ = (peer, rest, stream);
    }

    /// Appends the answer to a request that was not received whole.
    fn refuse(&mut self, why: &str, out: &mut Vec<u8>);

    /// Notes that no client can be accepted in the ordinary way, because the process has no free file descriptor or no
    /// memory. The server calls it in each turn in which that happens. The default does nothing.
    fn cannot_accept(&mut self, error: &io::Error) {
        let _ = error;
    }
}

/// A server of any number of clients. `R` is [`Service::Rest`].
#[derive(Debug)]
pub struct LineServer<R> {
    listener: Listener,
    limits: Limits,
    /// In the order in which they are served next.
    clients: Vec<Client<R>>,
    /// Watches the listener and all clients; `None` if the kernel gave none.
    ready: Option<OwnedFd>,
    /// A descriptor that is given up for a client when the process has no free one, so that operators can still look.
    reserve: Option<OwnedFd>,
}

#[derive(Debug)]
struct Client<R> {
    stream: UnixStream,
    peer: Peer,
    input: Vec<u8>,
    output: Vec<u8>,
    /// Bytes of `output` that are written.
    written: usize,
    rest: Answer<R>,
    /// Start of the present phase: idle, a request, or an answer.
    since: Instant,
    /// True if the last look found nothing to read.
    silent: bool,
    /// True if the connection ends after its answer.
    last: bool,
    /// Events that [`LineServer::descriptor`] reports for this client.
    watched: EventFlags,
}

/// Rest of a turn.
struct Budget {
    read: usize,
    written: usize,
    end: Instant,
}

impl Budget {
    fn is_over(&self) -> bool {
        Instant::now() >= self.end
    }
}

/// State of a connection after a step.
#[derive(PartialEq, Eq)]
enum Step {
    /// Did something, and may do more.
    Progress,
    /// Waits for the client.
    Waiting,
    /// The service takes the connection.
    HandOver,
    Closed,
}

impl<R> LineServer<R> {
    /// Creates a server without clients.
    pub fn new(listener: Listener, limits: Limits) -> Self {
        let ready = epoll::create(epoll::CreateFlags::CLOEXEC).ok();
        let watched = ready.filter(|set| epoll::add(set, &listener, EventData::new_u64(0), EventFlags::IN).is_ok());
        let mut server = Self { listener, limits, clients: Vec::new(), ready: watched, reserve: None };
        server.take_reserve();
        server
    }

    /// Returns a descriptor that is readable while [`Self::serve`] may have work: a connection or request waits, a
    /// client has read its answer, or a client has gone. It also stays readable while a limit holds work back, so the
    /// caller pauses after a call that returns false.
    ///
    /// `None` if the kernel gave no descriptor; then the caller serves at intervals.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.ready.as_ref().map(AsFd::as_fd)
    }

    /// Returns the number of connections.
    pub fn clients(&self) -> usize {
        self.clients.len()
    }

    /// Serves the clients for one turn. Returns false if nothing happened.
    pub fn serve(&mut self, service: &mut impl Service<Rest = R>) -> bool {
        let now = Instant::now();
        let limits = self.limits;
        let mut budget = Budget { read: limits.turn_bytes, written: limits.turn_bytes, end: now + limits.turn_time };
        let mut moved = self.accept(now, service);
        // Every client gets a step before one gets a second step.
        let mut waiting = 0;
        // The time is looked at after a step. So a turn whose thread is interrupted makes at least one.
        while waiting < self.clients.len() {
            let mut client = self.clients.remove(0);
            match client.step(service, &limits, &mut budget) {
                Step::Closed => moved = true,
                Step::HandOver => {
                    moved = true;
                    if let Answer::HandOver(rest) = client.rest {
                        service.take(&client.peer, rest, client.stream);
                    }
                }
                Step::Progress => {
                    (moved, waiting) = (true, 0);
                    self.clients.push(client);
                }
                Step::Waiting => {
                    waiting += 1;
                    self.clients.push(client);
                }
            }
            if budget.is_over() {
                break;
            }
        }
        self.clients.retain(|client| client.is_subscribed() || client.since.elapsed() < client.time_limit(&limits));
        if let Some(set) = &self.ready {
            self.clients.iter_mut().for_each(|client| client.watch(set));
        }
        moved
    }

    /// Takes a descriptor in reserve, unless there is one or the process has none.
    fn take_reserve(&mut self) {
        if self.reserve.is_none() {
            self.reserve = self.listener.as_fd().try_clone_to_owned().ok();
        }
    }

    /// Ends the connection that has asked nothing for the longest time, if there is one.
    fn evict(&mut self, now: Instant) -> bool {
        let clients = self.clients.iter().enumerate();
        let silent = clients
            .filter(|(_, client)| client.silent && now.saturating_duration_since(client.since) >= MIN_TIME)
            .min_by_key(|(_, client)| client.since);
        let oldest = silent.map(|(oldest, _)| oldest);
        oldest.map(|oldest| self.clients.remove(oldest)).is_some()
    }

    /// Accepts connections that wait. Returns false if there were none.
    fn accept(&mut self, now: Instant, service: &mut impl Service<Rest = R>) -> bool {
        for accepted in 0..ACCEPTS {
            if self.clients.len() >= self.limits.clients && !self.evict(now) {
                return accepted > 0;
            }
            let (stream, peer) = loop {
                match self.listener.try_accept() {
                    Ok(Some(accepted)) => break accepted,
                    Ok(None) => {
                        self.take_reserve();
                        return accepted > 0;
                    }
                    // A silent client makes room if the reserve is in use. Clients that cannot be accepted wait.
                    Err(error) => {
                        service.cannot_accept(&error);
                        if self.reserve.take().is_none() && !self.evict(now) {
                            return accepted > 0;
                        }
                    }
                }
            };
            if let Some(set) = &self.ready {
                // A client that is not watched is served at the caller's intervals.
                let _ = epoll::add(set, &stream, EventData::new_u64(0), EventFlags::IN);
            }
            self.clients.push(Client {
                stream,
                peer,
                input: Vec::new(),
                output: Vec::new(),
                written: 0,
                rest: Answer::Done,
                since: now,
                silent: false,
                last: false,
                watched: EventFlags::IN,
            });
        }
        true
    }
}

impl<R> Client<R> {
    fn is_answering(&self) -> bool {
        self.written < self.output.len() || !matches!(self.rest, Answer::Done)
    }

    /// Returns whether the answer waits for something to report, and not for the client.
    fn is_subscribed(&self) -> bool {
        self.written == self.output.len() && matches!(self.rest, Answer::Later(_))
    }

    /// Watches for what the next step needs. Bytes that a client sends during an answer are no event, because they
    /// wait until its end.
    fn watch(&mut self, set: &OwnedFd) {
        let wanted = match (self.is_subscribed(), self.is_answering()) {
            (true, _) => EventFlags::RDHUP,
            (false, true) => EventFlags::OUT,
            (false, false) => EventFlags::IN,
        };
        if wanted != self.watched && epoll::modify(set, &self.stream, EventData::new_u64(0), wanted).is_ok() {
            self.watched = wanted;
        }
    }

    fn time_limit(&self, limits: &Limits) -> Duration {
        match (self.is_answering(), self.input.is_empty()) {
            (true, _) => limits.answer_time,
            (false, false) => limits.request_time,
            (false, true) => limits.idle_time,
        }
    }

    fn step(&mut self, service: &mut impl Service<Rest = R>, limits: &Limits, budget: &mut Budget) -> Step {
        if self.is_answering() { self.write(service, budget) } else { self.read(service, limits, budget) }
    }

    fn write(&mut self, service: &mut impl Service<Rest = R>, budget: &mut Budget) -> Step {
        if self.written == self.output.len() {
            if matches!(self.rest, Answer::HandOver(_)) {
                return Step::HandOver;
            }
            if self.is_subscribed() && !self.is_open() {
                return Step::Closed;
            }
            (self.written, self.output) = (0, Vec::new());
            let subscribed = matches!(self.rest, Answer::Later(_));
            self.rest = match std::mem::replace(&mut self.rest, Answer::Done) {
                done @ (Answer::Done | Answer::HandOver(_)) => done,
                Answer::More(rest) | Answer::Later(rest) => service.resume(rest, &mut self.output),
            };
            if self.output.is_empty() {
                return if matches!(self.rest, Answer::Later(_)) { Step::Waiting } else { Step::Progress };
            }
            if subscribed {
                self.since = Instant::now();
            }
        }
        let end = self.output.len().min(self.written + budget.written);
        if end == self.written {
            return Step::Waiting;
        }
        match (&self.stream).write(&self.output[self.written..end]) {
            Ok(n) => {
                self.written += n;
                budget.written -= n;
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Step::Waiting,
            Err(_) => return Step::Closed,
        }
        if self.is_answering() {
            return Step::Progress;
        }
        self.since = Instant::now();
        if self.last { Step::Closed } else { Step::Progress }
    }

    /// Returns whether the client still has the connection. Bytes that it sends during an answer wait in the socket.
    fn is_open(&self) -> bool {
        let mut byte = [0];
        match rustix::net::recv(&self.stream, &mut byte, RecvFlags::PEEK | RecvFlags::DONTWAIT) {
            Ok((0, _)) => false,
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => true,
            Err(_) => false,
        }
    }

    fn read(&mut self, service: &mut impl Service<Rest = R>, limits: &Limits, budget: &mut Budget) -> Step {
        self.silent = false;
        // A request that arrived behind another one comes first.
        if let Some(end) = self.input.iter().position(|byte| *byte == b'\n') {
            let request: Vec<u8> = self.input.drain(..=end).collect();
            self.rest = service.answer(&self.peer, &request[..end], &mut self.output);
            self.since = Instant::now();
            return Step::Progress;
        }
        if self.input.len() > limits.request_bytes {
            return self.refuse(service, &format!("a request has at most {} bytes", limits.request_bytes));
        }
        let mut bytes = [0; 4096];
        let most = bytes.len().min(budget.read);
        if most == 0 {
            return Step::Waiting;
        }
        match (&self.stream).read(&mut bytes[..most]) {
            Ok(0) if self.input.is_empty() => Step::Closed,
            Ok(0) => self.refuse(service, "the request ends before its line does"),
            Ok(n) => {
                if self.input.is_empty() {
                    self.since = Instant::now();
                }
                self.input.extend_from_slice(&bytes[..n]);
                budget.read -= n;
                Step::Progress
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => Step::Progress,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                self.silent = true;
                Step::Waiting
            }
            Err(_) => Step::Closed,
        }
    }

    fn refuse(&mut self, service: &mut impl Service<Rest = R>, why: &str) -> Step {
        self.input = Vec::new();
        service.refuse(why, &mut self.output);
        (self.since, self.last) = (Instant::now(), true);
        Step::Progress
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::path::Path;

    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;
    use crate::listener::{Access, connect};

    const WAIT_LIMIT: Duration = Duration::from_secs(60);
    /// Bytes of a part of a long answer.
    const PART: usize = 16 << 10;

    /// Answers `N` with a line of N parts, `0` with a line for each event, and everything else with the request itself.
    /// After the answer to `take`, it keeps the connection.
    #[derive(Default)]
    struct Echo {
        answered: usize,
        parts: usize,
        event: Option<u8>,
        taken: Option<UnixStream>,
    }

    impl Service for Echo {
        type Rest = usize;

        fn answer(&mut self, _: &Peer, request: &[u8], out: &mut Vec<u8>) -> Answer<usize> {
            self.answered += 1;
            match std::str::from_utf8(request).ok().and_then(|text| text.parse().ok()) {
                Some(0) => Answer::Later(0),
                Some(parts) => Answer::More(parts),
                None => {
                    out.extend_from_slice(request);
                    out.push(b'\n');
                    if request == b"take" { Answer::HandOver(7) } else { Answer::Done }
                }
            }
        }

        fn resume(&mut self, rest: usize, out: &mut Vec<u8>) -> Answer<usize> {
            if rest == 0 {
                out.extend(self.event.take().map(|event| [event, b'\n']).into_iter().flatten());
                return Answer::Later(0);
            }
            self.parts += 1;
            out.resize(out.len() + PART, b'x');
            if rest == 1 {
                out.push(b'\n');
                return Answer::Done;
            }
            Answer::More(rest - 1)
        }

        fn take(&mut self, _: &Peer, rest: usize, stream: UnixStream) {
            assert_eq!(rest, 7);
            self.taken = Some(stream);
        }

        fn refuse(&mut self, why: &str, out: &mut Vec<u8>) {
            out.extend_from_slice(format!("error: {why}\n").as_bytes());
        }
    }

    fn server(path: &Path, limits: Limits) -> LineServer<usize> {
        LineServer::new(Listener::bind(path, &Access::default()).unwrap(), limits)
    }

    /// Sends bytes, while a reader in another thread takes what comes, and returns that.
    fn client(path: &Path, bytes: Vec<u8>) -> std::thread::JoinHandle<String> {
        let path = path.to_owned();
        std::thread::spawn(move || {
            let mut stream = connect(&path, WAIT_LIMIT).unwrap();
            // The server may close before it has read everything.
            let _ = stream.write_all(&bytes);
            let _ = stream.shutdown(std::net::Shutdown::Write);
            let mut text = String::new();
            let _ = BufReader::new(stream).read_line(&mut text);
            text
        })
    }

    #[test]
    fn requests_are_answered_in_order() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.sock");
        let (mut server, mut service) = (server(&path, Limits::default()), Echo::default());
        let thread = std::thread::spawn({
            let path = path.clone();
            move || {
                let mut stream = connect(&path, WAIT_LIMIT).unwrap();
                stream.write_all(b"one\ntwo\n3\nfo").unwrap();
                stream.write_all(b"ur\nfive").unwrap();
                stream.shutdown(std::net::Shutdown::Write).unwrap();
                let mut text = String::new();
                stream.read_to_string(&mut text).unwrap();
                text
            }
        });
        while !thread.is_finished() {
            server.serve(&mut service);
        }
        let long = "x".repeat(3 * PART);
        let expected = format!("one\ntwo\n{long}\nfour\nerror: the request ends before its line does\n");
        assert!(thread.join().unwrap() == expected);
        assert_eq!((service.answered, service.parts, server.clients()), (4, 3, 0));
    }

    #[test]
    fn a_long_answer_is_made_as_it_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.sock");
        let (mut server, mut service) = (server(&path, Limits::default()), Echo::default());
        let mut slow = connect(&path, WAIT_LIMIT).unwrap();
        slow.write_all(b"100000\n").unwrap();
        // The socket takes some parts. Then none is made, however often the server is called.
        (0..1000).for_each(|_| _ = server.serve(&mut service));
        let made = service.parts;
        assert!((1..200).contains(&made), "{made}");
        (0..1000).for_each(|_| _ = server.serve(&mut service));
        assert_eq!(service.parts, made);
        // Another client is served meanwhile.
        let other = client(&path, b"hello\n".to_vec());
        while !other.is_finished() {
            server.serve(&mut service);
        }
        assert_eq!(other.join().unwrap(), "hello\n");
        slow.read_exact(&mut vec![0; 4 * PART]).unwrap();
        (0..1000).for_each(|_| _ = server.serve(&mut service));
        assert!(service.parts > made && service.parts < made + 200, "{made} {}", service.parts);
    }

    #[test]
    fn subscriptions_end_with_their_connection_only() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.sock");
        let limits = Limits { answer_time: Duration::from_millis(1), ..Limits::default() };
        let (mut server, mut service) = (server(&path, limits), Echo::default());
        let mut stream = connect(&path, WAIT_LIMIT).unwrap();
        stream.write_all(b"0\n").unwrap();
        for event in *b"abc" {
            server.serve(&mut service);
            std::thread::sleep(Duration::from_millis(5));
            server.serve(&mut service);
            assert_eq!(server.clients(), 1);
            service.event = Some(event);
            server.serve(&mut service);
            let mut line = [0; 2];
            stream.read_exact(&mut line).unwrap();
            assert_eq!(line, [event, b'\n']);
        }
        drop(stream);
        server.serve(&mut service);
        assert_eq!(server.clients(), 0);
    }

    #[test]
    fn a_connection_is_handed_over_after_its_answer() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.sock");
        let (mut server, mut service) = (server(&path, Limits::default()), Echo::default());
        let mut stream = connect(&path, WAIT_LIMIT).unwrap();
        stream.write_all(b"one\ntake\nthree\n").unwrap();
        while service.taken.is_none() {
            server.serve(&mut service);
        }
        assert_eq!((server.clients(), service.answered), (0, 2));
        service.taken.take().unwrap().write_all(b"from the thread").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        assert_eq!(text, "one\ntake\nfrom the thread");
    }

    #[test]
    fn a_turn_whose_time_is_over_makes_one_step() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.sock");
        let (mut server, mut service) =
            (server(&path, Limits { turn_time: Duration::ZERO, ..Limits::default() }), Echo::default());
        let _silent = connect(&path, WAIT_LIMIT).unwrap();
        let mut stream = connect(&path, WAIT_LIMIT).unwrap();
        stream.write_all(b"one\n").unwrap();
        // A look at the silent client, then one step each to read, to answer and to write.
        for _ in 0..8 {
            server.serve(&mut service);
        }
        let mut line = [0; 4];
        stream.read_exact(&mut line).unwrap();
        assert_eq!(line, *b"one\n");
    }

    #[test]
    fn a_turn_has_a_limit_of_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.sock");
        let limits = Limits { turn_bytes: 2 * PART, turn_time: WAIT_LIMIT, ..Limits::default() };
        let (mut server, mut service) = (server(&path, limits), Echo::default());
        let mut clients: Vec<UnixStream> = (0..8).map(|_| connect(&path, WAIT_LIMIT).unwrap()).collect();
        clients.iter_mut().for_each(|client| client.write_all(b"8\n").unwrap());
        for _ in 0..20 {
            let before = service.parts;
            server.serve(&mut service);
            assert!(service.parts - before <= 2 + 8, "one part for each client, and two that are written");
        }
        assert!(service.parts > 16);
    }

    #[test]
    fn endless_and_silent_clients_end() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.sock");
        let mut service = Echo::default();
        let mut patient = server(&path, Limits { request_time: WAIT_LIMIT, ..Limits::default() });
        let endless = client(&path, vec![b'x'; 16 << 20]);
        while !endless.is_finished() {
            patient.serve(&mut service);
        }
        assert_eq!(endless.join().unwrap(), "error: a request has at most 65536 bytes\n");
        drop(patient);
        // Longer than a busy machine interrupts the first turn.
        let short = Duration::from_millis(500);
        let limits = Limits { idle_time: short, request_time: short, answer_time: short, ..Limits::default() };
        let mut server = server(&path, limits);
        let _silent = connect(&path, WAIT_LIMIT).unwrap();
        let mut half = connect(&path, WAIT_LIMIT).unwrap();
        half.write_all(b"hal").unwrap();
        let mut deaf = connect(&path, WAIT_LIMIT).unwrap();
        deaf.write_all(b"100000\n").unwrap();
        server.serve(&mut service);
        assert_eq!(server.clients(), 3);
        let begin = Instant::now();
        while server.clients() > 0 && begin.elapsed() < WAIT_LIMIT {
            server.serve(&mut service);
        }
        assert_eq!((server.clients(), service.answered), (0, 1));
    }

    #[test]
    fn silent_clients_make_room_for_others() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.sock");
        let limits = Limits { clients: 4, idle_time: WAIT_LIMIT, ..Limits::default() };
        let (mut server, mut service) = (server(&path, limits), Echo::default());
        let silent: Vec<UnixStream> = (0..1000).map(|_| connect(&path, WAIT_LIMIT).unwrap()).collect();
        server.serve(&mut service);
        assert_eq!(server.clients(), 4);
        drop(silent.into_iter().skip(20));
        let other = client(&path, b"hello\n".to_vec());
        while !other.is_finished() {
            server.serve(&mut service);
            assert!(server.clients() <= 4);
        }
        assert_eq!(other.join().unwrap(), "hello\n");
    }

    /// Returns whether the descriptor of the server is readable.
    fn is_ready(server: &LineServer<usize>) -> bool {
        let mut fds = [PollFd::from_borrowed_fd(server.descriptor().unwrap(), PollFlags::IN)];
        poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() > 0
    }

    #[test]
    fn the_descriptor_reports_work_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.sock");
        // A turn whose thread is interrupted may end before it comes to the client that has work.
        let limits = Limits { turn_time: WAIT_LIMIT, ..Limits::default() };
        let (mut server, mut service) = (server(&path, limits), Echo::default());
        assert!(!is_ready(&server), "nobody is there");
        let mut one = connect(&path, WAIT_LIMIT).unwrap();
        assert!(is_ready(&server), "a connection");
        assert!(server.serve(&mut service) && !is_ready(&server) && !server.serve(&mut service));
        one.write_all(b"hello\n").unwrap();
        assert!(is_ready(&server), "a request");
        assert!(server.serve(&mut service) && !is_ready(&server));
        // A client that does not read its answer, and sends meanwhile, is no work. One that has read it is.
        let mut deaf = connect(&path, WAIT_LIMIT).unwrap();
        deaf.write_all(b"100000\nmore\n").unwrap();
        while server.serve(&mut service) {}
        deaf.write_all(b"even more\n").unwrap();
        assert!(!is_ready(&server) && server.clients() == 2);
        let mut bytes = vec![0; 8 << 20];
        let mut read = 0;
        while !is_ready(&server) {
            read += deaf.read(&mut bytes).unwrap();
        }
        assert!(read > PART && server.serve(&mut service));
        drop(deaf);
        assert!(is_ready(&server), "a client has gone");
        while server.serve(&mut service) {}
        // An answer that waits for an event is no work, until the client goes.
        one.write_all(b"0\n0\n").unwrap();
        while server.serve(&mut service) {}
        assert!(!is_ready(&server) && server.clients() == 1);
        drop(one);
        assert!(is_ready(&server) && server.serve(&mut service) && !is_ready(&server));
        assert_eq!(server.clients(), 0);
    }

    #[test]
    fn connections_that_must_wait_are_no_progress() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.sock");
        let limits = Limits { clients: 2, ..Limits::default() };
        let (mut server, mut service) = (server(&path, limits), Echo::default());
        let _clients: Vec<UnixStream> = (0..5).map(|_| connect(&path, WAIT_LIMIT).unwrap()).collect();
        assert!(server.serve(&mut service));
        assert!(is_ready(&server) && !server.serve(&mut service), "three connections wait for their place");
    }
}
