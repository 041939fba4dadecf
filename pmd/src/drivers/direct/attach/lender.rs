//! The process with the port: offers it, makes queues for others, and ends them.

use std::any::Any;
use std::io::{ErrorKind, Read};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use wirepath_memory::passing::{self, MOST_BYTES};
use wirepath_verbs::Fate;
use wirepath_verbs::mlx5::var::Var;

use super::borrower::connect;
use super::message::{
    AttachError, Description, Inbox, MOST_BUFFERS, MOST_QUEUES, Packets, Reply, Request, Status, Wanted, encode,
};
use super::{Lend, Lent};
use crate::drivers::direct::device::Parts;
use crate::drivers::direct::graves::Ending;
use crate::packet::LentBuffers;
use crate::settings::{ConfigError, Settings};

/// Connections at a time.
const MOST_GUESTS: usize = 16;
/// How long a connection may be silent that has asked for nothing, or only looked: others wait to be let in.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long whoever listens on the socket already may take to let somebody in.
const SIGN_OF_LIFE: Duration = Duration::from_secs(1);
/// How long those that are attached may take to let go when the port stops.
const GOODBYE: Duration = Duration::from_millis(500);

/// What a port offers to other processes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Where it listens.
    pub socket: PathBuf,
    /// Most transmit queues of one process.
    pub tx_queues: u16,
    /// Most receive queues of one process, and of all of them together.
    pub rx_queues: u16,
    /// Most packet buffers of one process.
    pub buffers: u32,
}

impl Offer {
    /// One transmit queue and 2048 buffers for each process.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self { socket: socket.into(), tx_queues: 1, rx_queues: 0, buffers: 2048 }
    }

    /// From the keys of a port.
    pub(crate) fn read(settings: &Settings<'_>) -> Result<Option<Self>, ConfigError> {
        let socket = settings.get::<String>("attach")?;
        let plain = Self::new(socket.clone().unwrap_or_default());
        let queues = i64::from(MOST_QUEUES);
        let offer = Self {
            tx_queues: settings.integer("attach_tx_queues", 0..=queues)?.unwrap_or(plain.tx_queues),
            rx_queues: settings.integer("attach_rx_queues", 0..=queues)?.unwrap_or(plain.rx_queues),
            buffers: settings.integer("attach_buffers", 1..=i64::from(MOST_BUFFERS))?.unwrap_or(plain.buffers),
            ..plain
        };
        if socket.is_none() && offer != Self::new("") {
            return Err(settings.error("attach: missing, expected the path of a socket for those that attach"));
        }
        Ok(socket.is_some().then_some(offer))
    }
}

/// What was made for a process. Dropped, it ends, and its buffers are the pool's again.
pub(crate) struct Loan {
    ending: Ending,
    buffers: Option<LentBuffers>,
    rx_queues: u16,
    /// Told that it ends before anything does.
    var: Option<Var>,
}

impl Loan {
    /// The buffers alone, which are the other process's until it is seen to have let go.
    fn rest(&mut self) -> Self {
        Self { ending: self.ending.behind(), buffers: self.buffers.take(), rx_queues: 0, var: None }
    }

    /// Gives the buffers up: a process that does not listen may still write to them.
    fn bury(mut self) {
        if let Some(buffers) = self.buffers.take() {
            let count = buffers.count();
            self.ending.bury(buffers, count);
        }
    }

    fn end(&mut self) {
        self.var = None;
        if let Some(buffers) = self.buffers.take() {
            let count = buffers.count();
            self.ending.release(buffers, count);
        }
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        self.end();
    }
}

/// How the port's packets are spread over receive queues here and elsewhere.
pub(crate) struct Spreading<A> {
    /// Receive queues that are to be in another process.
    pub(crate) lent: u16,
    /// Packets are to be spread over them, or no longer.
    pub(crate) due: bool,
    /// Those that were made.
    made: Vec<Lent<A>>,
    /// What ends once nothing is spread over its queues any more.
    leaving: Vec<Loan>,
}

impl<A> Default for Spreading<A> {
    fn default() -> Self {
        Self { lent: 0, due: false, made: Vec::new(), leaving: Vec::new() }
    }
}

impl<A> Spreading<A> {
    fn change(&mut self, lent: u16) {
        (self.lent, self.due) = (lent, true);
    }

    /// Before what spreads packets ends: nobody else keeps its queues any more.
    pub(crate) fn let_go(&mut self) {
        self.made.clear();
        self.leaving.iter_mut().for_each(|loan| loan.ending.let_go());
    }

    /// Behind it: nothing is spread any more, and buffers are free.
    pub(crate) fn gone(&mut self) {
        self.leaving.clear();
    }

    /// All queues are there.
    pub(crate) fn made(&mut self, lent: Vec<Lent<A>>) {
        (self.made, self.due) = (lent, false);
    }
}

/// What a guest is about.
enum Stage {
    /// It has asked for nothing, or only looked.
    Looks,
    /// Its queues are being made.
    Waits(Loan, Vec<serde_json::Value>),
    Attached(Loan),
    /// It is done, or has to be; its receive queues are about to end.
    Leaves(Loan),
    /// Its queues have ended. The buffers are lent until it has closed its end of the socket, as it does behind its last packet.
    Left(Loan),
    Gone,
}

/// A process at the other end of a socket.
struct Guest {
    socket: UnixStream,
    inbox: Inbox,
    stage: Stage,
    /// When it last asked for something.
    heard: Instant,
}

/// Offers a port.
pub(crate) struct Lender {
    listener: UnixListener,
    offer: Offer,
    guests: Vec<Guest>,
    /// Those that are attached, as the turn began.
    attached: u64,
    served: u64,
    lost: u64,
}

/// What the lender works with, in one turn of the port.
pub(crate) struct Turn<'a, N: Lend> {
    pub(crate) nic: &'a N,
    pub(crate) parts: Parts<'a, N>,
    pub(crate) spreading: &'a mut Spreading<N::ReceiveAt>,
    /// How the port is, but for those attached.
    pub(crate) status: &'a Status,
}

impl Lender {
    /// Listens. What a process that was killed has left is removed.
    pub(crate) fn listen(offer: &Offer) -> std::io::Result<Self> {
        let path = &offer.socket;
        if is_abandoned(path) {
            std::fs::remove_file(path)?;
        }
        let listener = UnixListener::bind(path)?;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
        listener.set_nonblocking(true)?;
        Ok(Self { listener, offer: offer.clone(), guests: Vec::new(), attached: 0, served: 0, lost: 0 })
    }

    /// Processes that are attached now, that were ever, and that ended without a word.
    pub(crate) fn counts(&self) -> [u64; 3] {
        let attached = self.guests.iter().filter(|guest| matches!(guest.stage, Stage::Attached(_))).count();
        [attached as u64, self.served, self.lost]
    }

    /// Looks after everybody; never waits.
    pub(crate) fn turn<N: Lend>(&mut self, turn: &mut Turn<'_, N>) {
        self.accept();
        [self.attached, ..] = self.counts();
        let mut guests = std::mem::take(&mut self.guests);
        for guest in &mut guests {
            self.look_after(guest, turn);
        }
        guests.retain(|guest| !matches!(guest.stage, Stage::Gone));
        self.guests = guests;
    }

    /// Ends what has receive queues of a device whose own are about to be made anew.
    pub(crate) fn evict<A>(&mut self, spreading: &mut Spreading<A>) {
        for guest in &mut self.guests {
            if let Stage::Attached(loan) | Stage::Waits(loan, _) = &guest.stage
                && loan.rx_queues > 0
            {
                self.lost += u64::from(guest.leaves(spreading));
            }
        }
    }

    /// Ends everything: the device goes, or the port stops. Whoever was attached is told why, and that nothing more comes over the socket.
    pub(crate) fn end<A>(&mut self, spreading: &mut Spreading<A>, why: &str) {
        for guest in &mut self.guests {
            if guest.leaves(spreading) {
                guest.say(&Reply::Refused(why.to_owned()), &[]);
            }
            let _ = guest.socket.shutdown(Shutdown::Write);
        }
        (spreading.lent, spreading.due) = (0, false);
    }

    fn accept(&mut self) {
        while self.guests.len() < MOST_GUESTS
            && let Ok((socket, _)) = self.listener.accept()
        {
            // The file's mode keeps others out; on top of it, whoever was quicker than that.
            let user = rustix::process::geteuid();
            let known =
                rustix::net::sockopt::socket_peercred(&socket).is_ok_and(|peer| peer.uid == user || peer.uid.is_root());
            // Room for the longest reply: nobody waits here until it is read.
            let _ = rustix::net::sockopt::set_socket_send_buffer_size(&socket, 2 * MOST_BYTES);
            if known && socket.set_nonblocking(true).is_ok() {
                self.guests.push(Guest { socket, inbox: Inbox::default(), stage: Stage::Looks, heard: Instant::now() });
            }
        }
    }

    fn look_after<N: Lend>(&mut self, guest: &mut Guest, turn: &mut Turn<'_, N>) {
        let heard = guest.read();
        while let Some(request) = guest.inbox.next() {
            guest.heard = Instant::now();
            let stage = std::mem::replace(&mut guest.stage, Stage::Gone);
            guest.stage = match (request, stage) {
                (Ok(Request::Look), stage) => {
                    guest.stage = stage;
                    let status = self.status(turn.status);
                    if !guest.say(&Reply::Status(Box::new(status)), &[]) {
                        self.ends(guest, turn);
                    }
                    continue;
                }
                (Ok(Request::Attach(wanted)), Stage::Looks) => match self.prepare(&wanted, turn) {
                    Ok((loan, tx)) => Stage::Waits(loan, tx),
                    Err(why) => {
                        guest.say(&Reply::Refused(why), &[]);
                        Stage::Gone
                    }
                },
                (Ok(Request::Done), Stage::Attached(loan)) => Stage::Leaves(leave(loan, turn.spreading)),
                // It was told already.
                (Ok(Request::Done), stage @ (Stage::Leaves(_) | Stage::Left(_))) => stage,
                (request, stage) => {
                    let why = match request {
                        Ok(request) => format!("{request:?} is not for now"),
                        Err(error) => error.to_string(),
                    };
                    guest.stage = stage;
                    guest.say(&Reply::Refused(why), &[]);
                    self.ends(guest, turn);
                    continue;
                }
            };
        }
        if heard != Heard::Open {
            self.ends(guest, turn);
        }
        guest.stage = match std::mem::replace(&mut guest.stage, Stage::Gone) {
            Stage::Looks if guest.heard.elapsed() > PATIENCE => Stage::Gone,
            Stage::Waits(loan, tx) if !turn.spreading.due => self.complete(guest, loan, tx, turn),
            Stage::Leaves(loan) if !turn.spreading.due => {
                guest.say(&Reply::Ended, &[]);
                Stage::Left(loan)
            }
            stage => stage,
        };
        if heard == Heard::Closed && matches!(guest.stage, Stage::Left(_)) {
            guest.stage = Stage::Gone;
        }
    }

    /// A guest went without a word, or is to go.
    fn ends<N: Lend>(&mut self, guest: &mut Guest, turn: &mut Turn<'_, N>) {
        if guest.leaves(turn.spreading) {
            self.lost += 1;
            tracing::warn!("{}: a process that was attached is gone; its queues are ended", turn.status.device);
        }
    }

    /// Makes what a process wants, but for receive queues, which change how the port's packets are spread.
    fn prepare<N: Lend>(
        &mut self,
        wanted: &Wanted,
        turn: &mut Turn<'_, N>,
    ) -> Result<(Loan, Vec<serde_json::Value>), String> {
        let Offer { tx_queues, rx_queues, buffers, .. } = self.offer;
        let within = |what: &str, key: &str, wanted: u32, most: u32| match wanted <= most {
            true => Ok(()),
            false => Err(format!("{wanted} {what}; at most {most} are offered (`{key}` of the port)")),
        };
        within("transmit queues", "attach_tx_queues", wanted.tx_queues.into(), tx_queues.into())?;
        within("receive queues", "attach_rx_queues", wanted.rx_queues.into(), rx_queues.into())?;
        within("buffers", "attach_buffers", wanted.buffers, buffers)?;
        if wanted.rx_queues > 0 && (turn.spreading.lent > 0 || turn.spreading.due) {
            return Err("receive queues are in another process already, or come back from there".to_owned());
        }
        let pool = &turn.parts.config.pool;
        let buffers = pool.lend(wanted.buffers.max(1));
        let buffers =
            buffers.ok_or_else(|| format!("pool '{}' has no {} free buffers", pool.name(), wanted.buffers))?;
        let (mut keep, mut fates, mut tx) = (Vec::<Box<dyn Any + Send + Sync>>::new(), Vec::<Fate>::new(), Vec::new());
        for index in 0..usize::from(wanted.tx_queues) {
            let made = turn.nic.lend_send(&turn.parts, index).map_err(|error| error.to_string())?;
            keep.push(made.keep);
            fates.push(made.fate);
            tx.push(serde_json::to_value(made.at).map_err(|error| error.to_string())?);
        }
        if wanted.rx_queues > 0 {
            turn.spreading.change(wanted.rx_queues);
        }
        let ending = Ending::new(Box::new(keep), fates, turn.parts.graves);
        Ok((Loan { ending, buffers: Some(buffers), rx_queues: wanted.rx_queues, var: None }, tx))
    }

    /// Everything is there: describes it.
    fn complete<N: Lend>(
        &mut self,
        guest: &Guest,
        mut loan: Loan,
        tx: Vec<serde_json::Value>,
        turn: &mut Turn<'_, N>,
    ) -> Stage {
        self.served += 1;
        let described = self.describe(guest, &mut loan, tx, turn);
        match described {
            Ok(()) => Stage::Attached(loan),
            Err(error) => {
                guest.say(&Reply::Refused(error.to_string()), &[]);
                self.lost += 1;
                Stage::Leaves(leave(loan, turn.spreading))
            }
        }
    }

    fn describe<N: Lend>(
        &self,
        guest: &Guest,
        loan: &mut Loan,
        tx: Vec<serde_json::Value>,
        turn: &mut Turn<'_, N>,
    ) -> Result<(), AttachError> {
        let Parts { opened, memory, config, .. } = turn.parts;
        let value = |error: serde_json::Error| AttachError::Description(error.to_string());
        let mut rx = Vec::new();
        if loan.rx_queues > 0 {
            let made: Vec<_> = std::mem::take(&mut turn.spreading.made);
            if made.len() != usize::from(loan.rx_queues) {
                return Err(AttachError::Refused("the device made no receive queues for it".to_owned()));
            }
            let rings = made.iter().map(|lent| serde_json::to_value(&lent.at));
            rx = rings.collect::<Result<_, _>>().map_err(value)?;
            // The spread keeps them as well; both must go before their buffers are free.
            let (keep, fates) = made.into_iter().map(|lent| (lent.keep, lent.fate)).unzip::<_, _, Vec<_>, Vec<_>>();
            loan.ending.also(Box::new(keep), fates);
        }
        let regions = opened.allocator.regions()?;
        let pool = &config.pool;
        let lent = loan.buffers.as_ref().map(LentBuffers::ranges).unwrap_or_default();
        let var = N::var(&opened.verbs).map_err(|error| error.to_string());
        let exported =
            var.as_ref().map_err(Clone::clone).and_then(|var| var.export().map_err(|error| error.to_string()));
        let description = Description {
            status: self.status(turn.status),
            packets: Packets {
                address: pool.region().base().as_ptr() as u64,
                bytes: pool.region().bytes(),
                lkey: N::lkey(memory),
                offset: pool.region_offset(),
                span: pool.span(),
                lent,
            },
            domain: opened.domain.handle(),
            registration: N::registration(memory),
            regions: regions.len(),
            common: serde_json::to_value(turn.nic.common(memory, config)).map_err(value)?,
            tx,
            rx,
            var: exported.as_ref().map(|var| var.bytes.clone()).map_err(Clone::clone),
        };
        let mut files: Vec<BorrowedFd<'_>> = vec![opened.context.descriptor()];
        files.extend(pool.region().descriptor());
        files.extend(regions.iter().filter_map(|region| region.descriptor.as_ref()).map(AsFd::as_fd));
        files.extend(exported.iter().map(|var| var.lease));
        let message = encode(&Reply::Attached(Box::new(description)))?;
        passing::send(&guest.socket, &message, &files)?;
        drop(exported);
        loan.var = var.ok();
        Ok(())
    }

    fn status(&self, plain: &Status) -> Status {
        let Offer { tx_queues, rx_queues, buffers, .. } = self.offer;
        let offered = Wanted { tx_queues, rx_queues, buffers };
        let (attached, attached_ever, lost) = (self.attached, self.served, self.lost);
        Status { offered, attached, attached_ever, lost, ..plain.clone() }
    }
}

impl Drop for Lender {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.offer.socket);
        // Those who look at their socket have a moment to let go.
        let begin = Instant::now();
        for mut guest in self.guests.drain(..) {
            let loan = match std::mem::replace(&mut guest.stage, Stage::Gone) {
                Stage::Leaves(loan) | Stage::Left(loan) => loan,
                Stage::Attached(mut loan) | Stage::Waits(mut loan, _) => loan.rest(),
                Stage::Looks | Stage::Gone => continue,
            };
            let _ = guest.socket.shutdown(Shutdown::Write);
            while guest.read() != Heard::Closed {
                if begin.elapsed() > GOODBYE {
                    loan.bury();
                    break;
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }
}

/// Ends what a guest had; receive queues, once nothing is spread over them. What is returned are its buffers.
fn leave<A>(mut loan: Loan, spreading: &mut Spreading<A>) -> Loan {
    let rest = loan.rest();
    if loan.rx_queues > 0 {
        spreading.change(0);
        spreading.leaving.push(loan);
    }
    rest
}

/// What there was on a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Heard {
    Open,
    Nonsense,
    Closed,
}

impl Guest {
    /// Takes in what has come.
    fn read(&mut self) -> Heard {
        let mut bytes = [0; 512];
        // A guest that writes without an end must not keep the others waiting.
        for _ in 0..16 {
            match self.socket.read(&mut bytes) {
                Ok(0) => return Heard::Closed,
                // Nobody listens to it any more.
                Ok(_) if matches!(self.stage, Stage::Leaves(_) | Stage::Left(_) | Stage::Gone) => {}
                Ok(n) => {
                    if let Err(error) = self.inbox.take(&bytes[..n]) {
                        self.say(&Reply::Refused(error.to_string()), &[]);
                        return Heard::Nonsense;
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Heard::Open,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return Heard::Closed,
            }
        }
        Heard::Open
    }

    /// Ends what it has; `true`: it had something.
    fn leaves<A>(&mut self, spreading: &mut Spreading<A>) -> bool {
        let stage = std::mem::replace(&mut self.stage, Stage::Gone);
        let had = matches!(stage, Stage::Attached(_) | Stage::Waits(..));
        self.stage = match stage {
            Stage::Attached(loan) | Stage::Waits(loan, _) => Stage::Leaves(leave(loan, spreading)),
            Stage::Looks => Stage::Gone,
            stage => stage,
        };
        had
    }

    /// Sends a reply; `false`: it does not read, or is gone.
    fn say(&self, reply: &Reply, files: &[BorrowedFd<'_>]) -> bool {
        encode(reply).is_ok_and(|bytes| passing::send(&self.socket, &bytes, files).is_ok())
    }
}

/// Whether a socket is there on which nobody listens.
fn is_abandoned(path: &Path) -> bool {
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|file| file.file_type().is_socket());
    is_socket && connect(path, SIGN_OF_LIFE).is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused)
}
