// UNSAFETY: takes views of memory that another process describes, after a check that it lies in what was mapped.
#![allow(unsafe_code)]

//! Queues of a port in another process.
//!
//! One process opens the port and makes the queues in shared memory ([`Lender`]); another gets them, with a part of the packet buffers and the
//! page of doorbells, over a socket ([`Borrowed`]), and transmits and receives without the first. The first keeps the hardware's objects, and
//! ends them when the other is done or gone.
//!
//! ```text
//! lender                                     borrower
//! region of packets (memfd), port, queues
//!   -- description, files: device, packets, queue memory -->
//!                                            maps them, posts buffers, works
//!   <-- "done" ------------------------------
//! destroys the queues
//!   -- "ended" ----------------------------->
//!                                            frees what was posted
//! ```
//!
//! Both trust each other with the packets, as processes that share a region do; that a description fits what was mapped is checked all the
//! same. A device that is reset ends the loan: queues of a borrower are not made anew.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use wirepath_memory::{DeviceMemory, Doorbell, Region, passing};
use wirepath_nic_defs::mana::{DOORBELL_RQ, DOORBELL_SQ};
use wirepath_verbs::{Fate, RssQp};

use super::cq::Positions;
use super::nic::{self, ManaNic, Opened, Placed};
use super::rx::{ReceivePlace, ReceiveRing};
use super::tx::{SendPlace, SendRing};
use super::{NAME, Options};
use crate::drivers::direct::device::Nic;
use crate::drivers::direct::exchange::Exchange;
use crate::drivers::direct::graves::{Ending, Graves};
use crate::drivers::direct::keys::{Key, Keys};
use crate::drivers::direct::receive::{Receiver, Spread};
use crate::drivers::direct::send::Sender;
use crate::packet::{Arena, Pool, STRIDE};
use crate::port::{PortError, PortId, RxQueue, TxQueue};

/// The borrower uses nothing any more.
const DONE: u8 = b'd';
/// The hardware uses nothing any more.
const ENDED: u8 = b'e';
/// How long a borrower waits for the lender's answer at the end.
const PATIENCE: Duration = Duration::from_secs(10);

/// What is lent.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Transmit queues.
    pub tx_queues: u16,
    /// Receive queues.
    pub rx_queues: u16,
    /// Entries of each ring: a power of two, at most 256 with libmana of rdma-core 44.
    pub depth: u32,
    /// Largest layer-3 packet in bytes.
    pub mtu: u16,
}

/// Where something lies in a region of queue memory.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct At {
    region: usize,
    offset: usize,
    bytes: usize,
}

#[derive(Debug, Serialize, Deserialize)]
struct Queue {
    ring: At,
    completions: At,
    number: u32,
    /// Of a send queue.
    cq: u32,
    vport: u32,
}

#[derive(Debug, Serialize, Deserialize)]
struct Description {
    /// Address of the packets in the process that registered them, and their key.
    packets: u64,
    lkey: u32,
    mtu: u16,
    buffers: usize,
    tx: Vec<Queue>,
    rx: Vec<Queue>,
}

/// A port whose queues are for another process.
pub struct Lender {
    name: String,
    // Ended in this order.
    _rss: Option<RssQp>,
    tx: Vec<Placed<SendPlace>>,
    rx: Vec<Placed<ReceivePlace>>,
    keys: Arc<Keys>,
    opened: Opened,
    packets: Arc<Region>,
    shape: Shape,
}

impl Lender {
    /// Opens the port and makes the queues. `packets` is a shared region ([`wirepath_memory::RegionBuilder::shared`]) of which the borrower
    /// cuts its pool: nobody else may.
    ///
    /// # Errors
    /// As those of opening and starting a port; the region is not shared.
    pub fn open(options: Options, shape: Shape, packets: &Arc<Region>) -> Result<Self, PortError> {
        let name = options.0.device.clone();
        let failed = |error| ManaNic::WHO.refused(&name, error);
        if packets.descriptor().is_none() || !shape.depth.is_power_of_two() {
            let reason = "a loan needs packets in a shared region, and a depth that is a power of two".to_owned();
            return Err(PortError::Refused { driver: NAME, device: name, reason });
        }
        let found = ManaNic::WHO.find(&options.0)?;
        let opened =
            found.device.open().and_then(|context| Opened::open(context, &found, true, nic::verbs)).map_err(failed)?;
        let keys = nic::register(&opened, packets).map_err(failed)?;
        let tx = (0..usize::from(shape.tx_queues)).map(|index| nic::send_place(&opened, index, shape.depth));
        let tx = tx.collect::<Result<Vec<_>, _>>().map_err(failed)?;
        let (mut rss, mut rx) = (None, Vec::new());
        if shape.rx_queues > 0 {
            let buffers = nic::buffers(shape.mtu);
            let made = nic::receive_places(&opened, shape.rx_queues.into(), shape.depth, buffers).map_err(failed)?;
            (rss, rx) = (Some(made.0), made.1);
        }
        Ok(Self { name, _rss: rss, tx, rx, keys, opened, packets: Arc::clone(packets), shape })
    }

    /// Lends the queues to the process at the other end of the socket, and waits until it is done with them, or gone. Then ends them.
    ///
    /// # Errors
    /// The socket cannot be written.
    pub fn lend(self, socket: &UnixStream) -> io::Result<()> {
        self.describe(socket)?;
        let mut answer = [0];
        // Anything but "done" means that the borrower is gone; the queues end either way.
        let done = (&*socket).read(&mut answer).is_ok_and(|n| n == 1 && answer[0] == DONE);
        drop(self);
        if done { (&*socket).write_all(&[ENDED]) } else { Ok(()) }
    }

    fn describe(&self, socket: &UnixStream) -> io::Result<()> {
        let allocator = &self.opened.allocator;
        let at = |memory: &DeviceMemory| {
            let place = allocator.place(memory.base().as_ptr()).ok_or(io::ErrorKind::NotFound)?;
            io::Result::Ok(At { region: place.region, offset: place.offset, bytes: memory.bytes() })
        };
        let mut description = Description {
            packets: self.packets.base().as_ptr() as u64,
            lkey: self.keys.home().lkey(),
            mtu: self.shape.mtu,
            buffers: nic::buffers(self.shape.mtu),
            tx: Vec::new(),
            rx: Vec::new(),
        };
        for Placed { place, .. } in &self.tx {
            let (ring, completions) = (at(&place.ring)?, at(&place.completions)?);
            description.tx.push(Queue { ring, completions, number: place.sq, cq: place.cq, vport: place.vport });
        }
        for Placed { place, .. } in &self.rx {
            let (ring, completions) = (at(&place.ring)?, at(&place.completions)?);
            description.rx.push(Queue { ring, completions, number: place.rq, cq: 0, vport: 0 });
        }
        let regions = allocator.regions()?;
        let mut files: Vec<BorrowedFd<'_>> = vec![self.opened.context.descriptor()];
        files.extend(self.packets.descriptor());
        files.extend(regions.iter().filter_map(|region| region.descriptor.as_ref()).map(AsFd::as_fd));
        let text = serde_json::to_vec(&description)?;
        passing::send(socket, &text, &files)
    }
}

impl std::fmt::Debug for Lender {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lender").field("name", &self.name).field("shape", &self.shape).finish_non_exhaustive()
    }
}

/// Queues of a port that another process has opened. They go together: once the first of them, or this, is dropped, the lender ends all.
#[derive(Debug)]
pub struct Borrowed {
    /// Receive queues.
    pub rx: Vec<RxQueue>,
    /// Transmit queues.
    pub tx: Vec<TxQueue>,
    /// The buffers of the shared region.
    pub pool: Pool,
    _loan: Arc<Loan>,
}

/// The borrower's end of the socket.
#[derive(Debug)]
struct Loan {
    socket: Mutex<Option<UnixStream>>,
    /// Gone once the lender said that the hardware has let go.
    fate: Fate,
}

impl Loan {
    /// Says that everything may end, and waits until it has.
    fn end(&self) {
        if let Some(mut socket) = self.socket.lock().unwrap_or_else(PoisonError::into_inner).take() {
            let mut answer = [0];
            let _ = socket.set_read_timeout(Some(PATIENCE));
            let read = socket.write_all(&[DONE]).and_then(|()| socket.read_exact(&mut answer));
            if read.is_ok() && answer[0] == ENDED {
                self.fate.set_gone();
            }
        }
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

impl Borrowed {
    /// Takes the queues that a [`Lender`] lends at the other end of the socket, posts buffers and is ready. `port` is the number that its
    /// packets carry.
    ///
    /// # Errors
    /// What came is no loan, or cannot be mapped.
    pub fn take(socket: UnixStream, port: PortId) -> Result<Self, PortError> {
        let refuse = |reason: String| PortError::Refused { driver: NAME, device: "a borrowed port".to_owned(), reason };
        let failed = |error: io::Error| refuse(format!("the lender sent no loan: {error}"));
        let (description, files) = receive(&socket).map_err(failed)?;
        let mut files = files.into_iter();
        let (Some(device), Some(packets)) = (files.next(), files.next()) else {
            return Err(refuse("the lender sent no files".to_owned()));
        };
        let page = wirepath_verbs::mana::map_doorbells(device.as_fd()).map_err(|error| refuse(error.to_string()))?;
        let attach = |file: OwnedFd| Region::attach(file).map_err(|error| refuse(error.to_string()));
        let packets = attach(packets)?;
        let buffers = u32::try_from(packets.bytes() / STRIDE).map_err(|_| refuse("too many packets".to_owned()))?;
        let mut arena = Arena::in_region(packets);
        let pool = arena.pool("borrowed", buffers)?;
        let memory = files.map(|file| attach(file).map(Arc::new)).collect::<Result<Vec<_>, _>>()?;
        let view = |at: At| {
            let region = memory.get(at.region)?;
            let fits =
                at.offset.checked_add(at.bytes).is_some_and(|end| end <= region.bytes()) && at.offset.is_multiple_of(8);
            // SAFETY: inside the region, which is kept; this process looks at queue memory through such views only.
            fits.then(|| unsafe { DeviceMemory::new(region.base().add(at.offset), at.bytes, Arc::clone(region) as _) })
        };
        let loan = Arc::new(Loan { socket: Mutex::new(Some(socket)), fate: Fate::default() });
        let key = Key::registered_at(arena.region(), description.lkey, description.packets);
        let keys = Arc::new(Keys::new(key, Vec::new(), Box::new(())));
        let nonsense = || refuse("the lender described queues that cannot be".to_owned());
        let (mut rx, mut tx) = (Vec::new(), Vec::new());
        let spread = Spread::new(loan.ending());
        let blank = pool.blank().in_port(port);
        if !(1..=8).contains(&description.buffers) {
            return Err(nonsense());
        }
        for (index, queue) in description.rx.iter().enumerate() {
            let (Some(ring), Some(completions)) = (view(queue.ring), view(queue.completions)) else {
                return Err(nonsense());
            };
            let place =
                ReceivePlace { ring, completions, rq: queue.number, doorbell: Doorbell::new(&page, DOORBELL_RQ) };
            let (spread, buffers) = (Arc::clone(&spread), description.buffers);
            let ring = ReceiveRing::new(spread, &keys, place, &pool, &blank, buffers, Positions::UNKNOWN);
            let ring = ring.map_err(|dry| refuse(dry.to_string()))?.ok_or_else(nonsense)?;
            let exchange = Arc::new(Exchange::new());
            exchange.hand_out(ring);
            rx.push(RxQueue::new(Box::new(Receiver::new(exchange, pool.clone(), blank)), port, index as u16, NAME));
        }
        for (index, queue) in description.tx.iter().enumerate() {
            let (Some(ring), Some(completions)) = (view(queue.ring), view(queue.completions)) else {
                return Err(nonsense());
            };
            let doorbell = Doorbell::new(&page, DOORBELL_SQ);
            let (sq, cq, vport) = (queue.number, queue.cq, queue.vport);
            let place = SendPlace { ring, completions, sq, cq, vport, doorbell };
            let ring = SendRing::new(loan.ending(), Arc::clone(&keys), place, Positions::UNKNOWN);
            let exchange = Arc::new(Exchange::new());
            exchange.hand_out(ring.ok_or_else(nonsense)?);
            tx.push(TxQueue::new(
                Box::new(Sender::new(exchange, pool.clone(), description.mtu)),
                port,
                index as u16,
                NAME,
            ));
        }
        Ok(Self { rx, tx, pool, _loan: loan })
    }
}

/// Reads a description and the files that came with it.
fn receive(socket: &UnixStream) -> io::Result<(Description, Vec<OwnedFd>)> {
    let (text, files) = passing::receive(socket)?;
    Ok((serde_json::from_slice(&text)?, files))
}
