// UNSAFETY: takes views of memory that another process describes, after a check that it lies in what was mapped.
#![allow(unsafe_code)]

//! The process that attaches.

use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, SocketType, recv};
use serde::de::DeserializeOwned;
use wirepath_memory::{DeviceMemory, Region, passing};
use wirepath_verbs::mlx5::var::ImportedVar;
use wirepath_verbs::{Fate, ImportedDomain, ImportedRegion};

use super::message::{AttachError, Description, MOST_QUEUES, Packets, Reply, Request, Status, Wanted, decode, encode};
use super::{At, Borrow, Lend};
use crate::drivers::direct::exchange::Exchange;
use crate::drivers::direct::graves::{Ending, Graves};
use crate::drivers::direct::keys::{Key, Keys};
use crate::drivers::direct::receive::{Receiver, Spread};
use crate::drivers::direct::send::Sender;
use crate::drivers::{mana, mlx5};
use crate::packet::Pool;
use crate::port::{PortId, RxQueue, TxQueue};

/// How long an answer is waited for: the other process looks at its port a few times a second, and waits for its workers.
const PATIENCE: Duration = Duration::from_secs(10);

/// Memory of queues that another process has passed.
pub(crate) struct Views {
    regions: Vec<Arc<Region>>,
}

impl Views {
    /// A view of `at`, if it lies in what was passed, and is of `bytes` bytes where that is known.
    pub(crate) fn of(&self, at: At, bytes: Option<usize>) -> Option<DeviceMemory> {
        let region = self.regions.get(at.region)?;
        let end = at.offset.checked_add(at.bytes)?;
        let fits = end <= region.bytes() && at.offset.is_multiple_of(8) && at.bytes >= 8;
        if !fits || bytes.is_some_and(|bytes| bytes != at.bytes) {
            return None;
        }
        // SAFETY: inside the region, which is kept and whose file cannot be cut; this process looks at queue memory through such views
        // only.
        Some(unsafe { DeviceMemory::new(region.base().add(at.offset), at.bytes, Arc::clone(region) as _) })
    }
}

/// Queues of a port that another process has. They go together: once the first of them, or this, is dropped, all end. The buffers go back
/// when nothing holds a packet of them any more, nor the pool.
#[derive(Debug)]
pub struct Attached {
    /// Receive queues.
    pub rx: Vec<RxQueue>,
    /// Transmit queues.
    pub tx: Vec<TxQueue>,
    /// The buffers that are lent: a part of the pool of the other process.
    pub pool: Pool,
    /// How the port was.
    pub status: Status,
    /// A page of virtio doorbells of the device, or why there is none: libmlx5 has exported them since rdma-core 63.
    pub var: Result<ImportedVar, String>,
    loan: Arc<Loan>,
}

/// This end of the socket.
#[derive(Debug)]
struct Loan {
    socket: Mutex<Option<UnixStream>>,
    /// What the other process said when it ended the loan.
    why: OnceLock<String>,
    /// Gone once the other process said that the hardware has let go.
    fate: Fate,
}

impl Loan {
    fn socket(&self) -> std::sync::MutexGuard<'_, Option<UnixStream>> {
        self.socket.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Says that everything may end, and waits until it has.
    fn end(&self) {
        if let Some(socket) = self.socket().take()
            && say(&socket, &Request::Done).is_ok()
            && matches!(hear(&socket), Ok((Reply::Ended, _)))
        {
            self.fate.set_gone();
        }
    }

    fn is_live(&self) -> bool {
        let socket = self.socket();
        let Some(socket) = socket.as_ref() else { return false };
        // It says nothing before it is asked; what can be read is the end, or its beginning.
        matches!(recv(socket, &mut [0u8], RecvFlags::PEEK | RecvFlags::DONTWAIT), Err(Errno::AGAIN))
    }

    /// Hears what the other process says unasked: that, and why, it ends the loan.
    fn hear_the_end(&self) -> &str {
        self.why.get_or_init(|| {
            let heard = self.socket().take().map(|socket| hear(&socket));
            match heard {
                Some(Ok((Reply::Ended, _))) => {
                    self.fate.set_gone();
                    "its receive queues are made anew".to_owned()
                }
                Some(Ok((Reply::Refused(why), _))) => why,
                _ => "it is gone".to_owned(),
            }
        })
    }

    /// What ends before packets are free.
    fn ending(self: &Arc<Self>) -> Ending {
        Ending::new(Box::new(LoanEnd(Arc::clone(self))), vec![self.fate.clone()], &Graves::default())
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        self.end();
    }
}

/// Ends the loan when it goes.
struct LoanEnd(Arc<Loan>);

impl Drop for LoanEnd {
    fn drop(&mut self) {
        self.0.end();
    }
}

impl Attached {
    /// Looks at the port that is offered on a socket.
    ///
    /// # Errors
    /// Nobody offers one there.
    pub fn look(socket: &Path) -> Result<Status, AttachError> {
        let socket = connect(socket, PATIENCE).map_err(late)?;
        say(&socket, &Request::Look)?;
        match hear(&socket)?.0 {
            Reply::Status(status) => Ok(*status),
            Reply::Refused(why) => Err(AttachError::Refused(why)),
            _ => Err(AttachError::Message("it answers another question".to_owned())),
        }
    }

    /// Attaches to the port that is offered on a socket: queues and buffers as wanted, ready to work. `port` is the number that their
    /// packets carry.
    ///
    /// # Errors
    /// Nobody offers one there, or not as much; what came cannot be mapped, or is not what the kernel knows of the device.
    pub fn attach(socket: &Path, wanted: &Wanted, port: PortId) -> Result<Self, AttachError> {
        let socket = connect(socket, PATIENCE).map_err(late)?;
        say(&socket, &Request::Attach(*wanted))?;
        let invitation = match hear(&socket)? {
            (Reply::Attached(description), files) => {
                Invitation { socket, description: *description, files, wanted: *wanted, port }
            }
            (Reply::Refused(why), _) => return Err(AttachError::Refused(why)),
            _ => return Err(AttachError::Message("it answers another question".to_owned())),
        };
        match invitation.description.status.driver.as_str() {
            mana::NAME => mana::accept(invitation),
            mlx5::NAME => mlx5::accept(invitation),
            other => Err(cannot_be(format!("a port of driver \"{other}\""))),
        }
    }

    /// Whether the process with the port is there and has not ended this. Otherwise the queues move nothing, or nobody knows what: drop
    /// them. [`Self::why_ended`] says more.
    pub fn is_live(&self) -> bool {
        self.loan.is_live()
    }

    /// Why the queues move nothing any more: the device failed, the port was stopped, or the process with the port is gone. `None`: they do.
    pub fn why_ended(&self) -> Option<&str> {
        if self.is_live() { None } else { Some(self.loan.hear_the_end()) }
    }
}

/// A connection whose every step ends within `patience`.
pub(super) fn connect(path: &Path, patience: Duration) -> std::io::Result<UnixStream> {
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // Before it connects: where too many wait to be let in, that waits too.
    for way in [Timeout::Recv, Timeout::Send] {
        set_socket_timeout(&socket, way, Some(patience))?;
    }
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket.into())
}

fn late(error: std::io::Error) -> AttachError {
    let late = || std::io::Error::new(ErrorKind::TimedOut, format!("no answer within {} s", PATIENCE.as_secs()));
    AttachError::Socket(if error.kind() == ErrorKind::WouldBlock { late() } else { error })
}

fn say(socket: &UnixStream, request: &Request) -> Result<(), AttachError> {
    passing::send(socket, &encode(request)?, &[]).map_err(late)
}

fn hear(socket: &UnixStream) -> Result<(Reply, Vec<OwnedFd>), AttachError> {
    let (bytes, files) = passing::receive(socket).map_err(late)?;
    Ok((decode(&bytes)?, files))
}

fn cannot_be(what: impl Into<String>) -> AttachError {
    AttachError::Description(what.into())
}

/// The region of packets and the part of its pool that is lent.
fn packets(region: Region, packets: &Packets) -> Result<(Arc<Region>, Pool), AttachError> {
    let region = Arc::new(region);
    if region.bytes() != packets.bytes {
        return Err(cannot_be(format!("{} bytes of packets in a region of {}", packets.bytes, region.bytes())));
    }
    let pool = Pool::borrowed("attached", &region, packets.offset, packets.span, &packets.lent)?;
    Ok((region, pool))
}

fn read<T: DeserializeOwned>(what: &str, value: serde_json::Value) -> Result<T, AttachError> {
    serde_json::from_value(value).map_err(|error| cannot_be(format!("{what}: {error}")))
}

/// What another process has sent.
pub(crate) struct Invitation {
    socket: UnixStream,
    description: Description,
    files: Vec<OwnedFd>,
    wanted: Wanted,
    port: PortId,
}

impl Invitation {
    /// Takes what is described, of this kind of NIC.
    pub(crate) fn take<N: Lend>(self) -> Result<Attached, AttachError> {
        let Self { socket, description, files, wanted, port } = self;
        let Description { status, packets: lent, domain, registration, regions, common, tx, rx, var } = description;
        if files.len() != regions.saturating_add(2 + usize::from(var.is_ok())) {
            return Err(cannot_be(format!("{} files with {regions} regions of queue memory", files.len())));
        }
        if (tx.len(), rx.len()) != (wanted.tx_queues.into(), wanted.rx_queues.into())
            || tx.len().max(rx.len()) > MOST_QUEUES.into()
        {
            return Err(cannot_be(format!("{} and {} queues", tx.len(), rx.len())));
        }
        let buffers: u64 = lent.lent.iter().map(|range| u64::from(range.end.saturating_sub(range.start))).sum();
        if buffers != u64::from(wanted.buffers.max(1)) {
            return Err(cannot_be(format!("{buffers} buffers")));
        }
        let common: N::Common = read("queues", common)?;
        if N::mtu(&common) != Some(status.mtu) {
            return Err(cannot_be("queues that no driver makes, or of another MTU"));
        }
        let mut files = files.into_iter();
        let (Some(device), Some(memory)) = (files.next(), files.next()) else {
            return Err(cannot_be("no files"));
        };
        // The other process takes the buffers back when the socket is closed: not before the last packet has come back to the pool here.
        let kept = socket.try_clone()?.into();
        let (region, pool) = packets(Region::attach(memory)?.until_closed(kept), &lent)?;
        let queue_memory = files.by_ref().take(regions).map(|file| Region::attach(file).map(Arc::new));
        let views = Views { regions: queue_memory.collect::<Result<_, _>>()? };
        let (visitor, context) = N::visit(device)?;
        if let (Some(context), Some(registration)) = (&context, registration) {
            // What the kernel knows; both are the other process's, and are only looked at.
            let domain = ImportedDomain::new(context, domain)?;
            let known = ImportedRegion::new(&domain, registration)?;
            if (known.lkey(), known.bytes()) != (lent.lkey, lent.bytes) {
                let said = format!("key {:#x} of {} bytes, and the kernel knows ", lent.lkey, lent.bytes);
                return Err(cannot_be(said + &format!("{:#x} of {}", known.lkey(), known.bytes())));
            }
        }
        let var = match (var, files.next()) {
            (Ok(bytes), Some(lease)) => N::import_var(&visitor, &bytes, &lease).map_err(|error| error.to_string()),
            (Err(why), _) => Err(why),
            _ => Err("it came without its lease".to_owned()),
        };
        let loan = Arc::new(Loan { socket: Mutex::new(Some(socket)), why: OnceLock::new(), fate: Fate::default() });
        let key = Key::registered_at(&region, lent.lkey, lent.address);
        let keys = Arc::new(Keys::new(key, Vec::new(), Box::new(())));
        let blank = pool.blank().in_port(port);
        // Without receive queues it would end at once, and with it the loan.
        let spread = (!rx.is_empty()).then(|| Spread::new(loan.ending()));
        let around = Borrow { keys: &keys, pool: &pool, blank: &blank };
        let nonsense = || cannot_be("queues that do not fit their memory");
        let (mut receive, mut transmit) = (Vec::new(), Vec::new());
        for (index, at) in rx.into_iter().enumerate() {
            let (at, Some(spread)) = (read("a receive queue", at)?, &spread) else { break };
            let ring = N::borrow_receive(&visitor, &common, &at, &views, &around, Arc::clone(spread));
            let ring = ring.map_err(|dry| AttachError::Refused(dry.to_string()))?.ok_or_else(nonsense)?;
            let exchange = Arc::new(Exchange::new());
            exchange.hand_out(ring);
            let receiver = Receiver::new(exchange, pool.clone(), blank);
            receive.push(RxQueue::new(Box::new(receiver), port, index as u16, &status.device));
        }
        for (index, at) in tx.into_iter().enumerate() {
            let at = read("a transmit queue", at)?;
            let ring = N::borrow_send(&visitor, &common, &at, &views, &keys, loan.ending())?.ok_or_else(nonsense)?;
            let exchange = Arc::new(Exchange::new());
            exchange.hand_out(ring);
            let sender = Sender::new(exchange, pool.clone(), status.mtu);
            transmit.push(TxQueue::new(Box::new(sender), port, index as u16, &status.device));
        }
        Ok(Attached { rx: receive, tx: transmit, pool, status, var, loan })
    }
}

/// For fuzzing: a description of packets over a small region.
#[cfg(any(test, fuzzing))]
pub(super) fn hostile(described: &Packets) {
    let region = wirepath_memory::RegionBuilder::new(16 * crate::packet::STRIDE).shared().huge_pages(false).map();
    let file = region.expect("a region").descriptor().expect("shared").try_clone_to_owned().expect("a file");
    if let Ok((_, pool)) = Region::attach(file).map_err(AttachError::from).and_then(|region| packets(region, described))
    {
        let mut all: Vec<_> = std::iter::from_fn(|| pool.take()).collect();
        for packet in all.iter_mut() {
            let _ = packet.append(60);
        }
        assert_eq!(all.len(), pool.capacity() as usize);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::thread;

    use super::*;

    #[test]
    fn the_end_is_heard_though_it_comes_in_pieces() {
        let (mut lender, socket) = UnixStream::pair().unwrap();
        let loan = Loan { socket: Mutex::new(Some(socket)), why: OnceLock::new(), fate: Fate::default() };
        assert!(loan.is_live());
        let said = encode(&Reply::Refused("the port stops".to_owned())).unwrap();
        lender.write_all(&(said.len() as u32).to_le_bytes()).unwrap();
        assert!(!loan.is_live());
        let rest = thread::spawn(move || {
            thread::sleep(Duration::from_millis(50));
            lender.write_all(&said).unwrap();
        });
        assert_eq!(loan.hear_the_end(), "the port stops");
        assert!(!loan.is_live());
        rest.join().unwrap();
    }
}
