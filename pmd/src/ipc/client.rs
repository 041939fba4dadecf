//! The client side of `attach`: the process that uses queues of another process.

use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use serde::de::DeserializeOwned;
use wirepath_control_socket::connect;
use wirepath_memory::{Region, fd_passing};
use wirepath_verbs::mlx5::var::ImportedVar;
use wirepath_verbs::{DestroyedFlag, ImportedDomain, ImportedRegion};

use super::config::MAX_QUEUES;
use super::message::{AttachError, AttachRequest, Description, Packets, Reply, Request, Status, decode, encode};
use crate::drivers::nic::common::mr_table::{MrTable, RegisteredRegion};
use crate::drivers::nic::common::quarantine::{Quarantine, QueueTeardown};
use crate::drivers::nic::common::ring_handoff::RingHandoff;
use crate::drivers::nic::common::rx_queue::{NicRxQueue, RssGroup};
use crate::drivers::nic::common::shared_memory::SharedRegions;
use crate::drivers::nic::common::shared_nic::{RxImport, SharedNic};
use crate::drivers::nic::common::tx_queue::NicTxQueue;
use crate::port::{PortId, RxQueue, TxQueue};
use wirepath_packet::Pool;

/// Timeout of one reply. The server polls its port a few times a second and waits for its workers.
pub(super) const REPLY_TIMEOUT: Duration = Duration::from_secs(10);

/// Queues of a port that belongs to another process. The lease covers all of them: dropping this or any queue
/// ends it. The buffers return to the server once no packet and no handle of the pool is left.
#[derive(Debug)]
pub struct AttachedPort {
    /// Receive queues.
    pub rx: Vec<RxQueue>,
    /// Transmit queues.
    pub tx: Vec<TxQueue>,
    /// Leased buffers: a part of the server's pool.
    pub pool: Pool,
    /// State of the port at the time of attaching.
    pub status: Status,
    /// A page of the device's virtio doorbells (VAR), or the reason for its absence. libmlx5 exports VARs
    /// since rdma-core 63.
    pub var: Result<ImportedVar, String>,
    lease: Arc<Lease>,
}

/// The client's end of the socket.
#[derive(Debug)]
struct Lease {
    socket: Mutex<Option<UnixStream>>,
    /// The reason that the server gave for ending the lease.
    why: OnceLock<String>,
    /// Set once the server has confirmed that the hardware has released the queues.
    destroyed: DestroyedFlag,
}

impl Lease {
    fn socket(&self) -> std::sync::MutexGuard<'_, Option<UnixStream>> {
        self.socket.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends `Done` and waits until the server has ended the queues.
    fn end(&self) {
        if let Some(socket) = self.socket().take()
            && send(&socket, &Request::Done).is_ok()
            && matches!(receive(&socket), Ok((Reply::Ended, _)))
        {
            self.destroyed.set();
        }
    }

    fn is_live(&self) -> bool {
        let socket = self.socket();
        let Some(socket) = socket.as_ref() else { return false };
        // The server sends nothing unasked, except the end of the lease. Readable data is that message or its
        // beginning.
        matches!(recv(socket, &mut [0u8], RecvFlags::PEEK | RecvFlags::DONTWAIT), Err(Errno::AGAIN))
    }

    /// Receives the server's unsolicited message, which ends the lease and gives the reason.
    fn read_end_reason(&self) -> &str {
        self.why.get_or_init(|| {
            let reply = self.socket().take().map(|socket| receive(&socket));
            match reply {
                Some(Ok((Reply::Ended, _))) => {
                    self.destroyed.set();
                    "the receive queues of the port are recreated; attach again".to_owned()
                }
                Some(Ok((Reply::Refused(why), _))) => why,
                _ => "the server process is gone".to_owned(),
            }
        })
    }

    /// Returns the teardown that ends the lease before packets are freed.
    fn teardown(self: &Arc<Self>) -> QueueTeardown {
        QueueTeardown::new(Box::new(LeaseEnd(Arc::clone(self))), vec![self.destroyed.clone()], &Quarantine::default())
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.end();
    }
}

/// Ends the lease on drop.
struct LeaseEnd(Arc<Lease>);

impl Drop for LeaseEnd {
    fn drop(&mut self) {
        self.0.end();
    }
}

impl AttachedPort {
    /// Queries the state of the port that a server offers on `socket`.
    ///
    /// # Errors
    /// No server listens on the socket, or it does not answer in time.
    pub fn query(socket: &Path) -> Result<Status, AttachError> {
        let socket = connect(socket, REPLY_TIMEOUT).map_err(map_timeout)?;
        send(&socket, &Request::Look)?;
        match receive(&socket)?.0 {
            Reply::Status(status) => Ok(*status),
            Reply::Refused(why) => Err(AttachError::Refused(why)),
            _ => Err(AttachError::Message("the reply does not match the request".to_owned())),
        }
    }

    /// Returns true while the server runs and has not ended the lease. Otherwise the queues move no packets
    /// and are to be dropped; [`Self::end_reason`] gives the reason.
    pub fn is_live(&self) -> bool {
        self.lease.is_live()
    }

    /// Returns why the lease ended: the device failed, the port was stopped, or the server is gone. `None`
    /// while it is live.
    pub fn end_reason(&self) -> Option<&str> {
        if self.is_live() { None } else { Some(self.lease.read_end_reason()) }
    }
}

pub(super) fn map_timeout(error: std::io::Error) -> AttachError {
    let map_timeout =
        || std::io::Error::new(ErrorKind::TimedOut, format!("no answer within {} s", REPLY_TIMEOUT.as_secs()));
    AttachError::Socket(if error.kind() == ErrorKind::WouldBlock { map_timeout() } else { error })
}

pub(super) fn send(socket: &UnixStream, request: &Request) -> Result<(), AttachError> {
    fd_passing::send(socket, &encode(request)?, &[]).map_err(map_timeout)
}

pub(super) fn receive(socket: &UnixStream) -> Result<(Reply, Vec<OwnedFd>), AttachError> {
    let (bytes, files) = fd_passing::receive(socket).map_err(map_timeout)?;
    Ok((decode(&bytes)?, files))
}

pub(super) fn invalid(what: impl Into<String>) -> AttachError {
    AttachError::Description(what.into())
}

/// Returns the packet region and a pool over its leased part.
fn packets(region: Region, packets: &Packets) -> Result<(Arc<Region>, Pool), AttachError> {
    let region = Arc::new(region);
    if region.bytes() != packets.bytes {
        return Err(invalid(format!("{} bytes of packets in a region of {} bytes", packets.bytes, region.bytes())));
    }
    let pool = Pool::from_lease("attached", &region, packets.offset, packets.span, &packets.lent)?;
    Ok((region, pool))
}

fn read<T: DeserializeOwned>(what: &str, value: serde_json::Value) -> Result<T, AttachError> {
    serde_json::from_value(value).map_err(|error| invalid(format!("{what}: {error}")))
}

/// The server's reply to an attach request.
pub(crate) struct AttachOffer {
    pub(super) socket: UnixStream,
    pub(super) description: Description,
    pub(super) files: Vec<OwnedFd>,
    pub(super) wanted: AttachRequest,
    pub(super) port: PortId,
}

impl AttachOffer {
    /// Maps the described queues, for this kind of NIC.
    pub(crate) fn take<N: SharedNic>(self) -> Result<AttachedPort, AttachError> {
        let Self { socket, description, files, wanted, port } = self;
        let Description { status, packets: lent, domain, registration, regions, common, tx, rx, var } = description;
        if files.len() != regions.saturating_add(2 + usize::from(var.is_ok())) {
            return Err(invalid(format!("{} files for {regions} regions of queue memory", files.len())));
        }
        if (tx.len(), rx.len()) != (wanted.tx_queues.into(), wanted.rx_queues.into())
            || tx.len().max(rx.len()) > MAX_QUEUES.into()
        {
            return Err(invalid(format!(
                "{} transmit and {} receive queues differ from the request",
                tx.len(),
                rx.len()
            )));
        }
        let buffers: u64 = lent.lent.iter().map(|range| u64::from(range.end.saturating_sub(range.start))).sum();
        if buffers != u64::from(wanted.buffers.max(1)) {
            return Err(invalid(format!("{buffers} buffers differ from the request")));
        }
        let common: N::Common = read("queues", common)?;
        if N::checked_mtu(&common) != Some(status.mtu) {
            return Err(invalid("queue parameters outside the driver's limits, or another MTU"));
        }
        let mut files = files.into_iter();
        let (Some(device), Some(memory)) = (files.next(), files.next()) else {
            return Err(invalid("files are missing"));
        };
        // The server takes the buffers back when the socket closes. The region keeps it open until the last
        // packet has returned to the pool.
        let kept = socket.try_clone()?.into();
        let (region, pool) = packets(Region::from_memfd(memory)?.close_on_unmap(kept), &lent)?;
        let queue_memory = files.by_ref().take(regions).map(|file| Region::from_memfd(file).map(Arc::new));
        let shared = SharedRegions { regions: queue_memory.collect::<Result<_, _>>()? };
        let (imported, context) = N::import_device(device)?;
        if let (Some(context), Some(registration)) = (&context, registration) {
            // Compares the description with the kernel's view. Domain and registration belong to the server
            // and are only queried.
            let domain = ImportedDomain::new(context, domain)?;
            let known = ImportedRegion::new(&domain, registration)?;
            if (known.lkey(), known.bytes()) != (lent.lkey, lent.bytes) {
                let text = format!("lkey {:#x} of {} bytes, but the kernel reports ", lent.lkey, lent.bytes);
                return Err(invalid(text + &format!("{:#x} of {} bytes", known.lkey(), known.bytes())));
            }
        }
        let var = match (var, files.next()) {
            (Ok(bytes), Some(lease)) => N::import_var(&imported, &bytes, &lease).map_err(|error| error.to_string()),
            (Err(why), _) => Err(why),
            _ => Err("the VAR came without its lease".to_owned()),
        };
        let lease = Arc::new(Lease {
            socket: Mutex::new(Some(socket)),
            why: OnceLock::new(),
            destroyed: DestroyedFlag::default(),
        });
        let key = RegisteredRegion::registered_at(&region, lent.lkey, lent.address);
        let mrs = Arc::new(MrTable::new(key, Vec::new(), Box::new(())));
        let template = pool.meta_template().in_port(port);
        // Without receive queues the group would be dropped at once, and its drop would end the lease.
        let rss_group = (!rx.is_empty()).then(|| RssGroup::new(lease.teardown()));
        let import = RxImport { mrs: &mrs, pool: &pool, template: &template };
        let mismatch = || invalid("queues that do not match their memory");
        let (mut receive, mut transmit) = (Vec::new(), Vec::new());
        for (index, at) in rx.into_iter().enumerate() {
            let (at, Some(rss_group)) = (read("a receive queue", at)?, &rss_group) else { break };
            let ring = N::import_rx(&imported, &common, &at, &shared, &import, Arc::clone(rss_group));
            let ring = ring.map_err(|dry| AttachError::Refused(dry.to_string()))?.ok_or_else(mismatch)?;
            let handoff = RingHandoff::with_ring(ring);
            let receiver = NicRxQueue::new(handoff, pool.clone(), template);
            receive.push(RxQueue::new(Box::new(receiver), port, index as u16, &status.device));
        }
        for (index, at) in tx.into_iter().enumerate() {
            let at = read("a transmit queue", at)?;
            let ring = N::import_tx(&imported, &common, &at, &shared, &mrs, lease.teardown())?.ok_or_else(mismatch)?;
            let handoff = RingHandoff::with_ring(ring);
            let sender = NicTxQueue::new(handoff, pool.clone(), status.mtu);
            transmit.push(TxQueue::new(Box::new(sender), port, index as u16, &status.device));
        }
        Ok(AttachedPort { rx: receive, tx: transmit, pool, status, var, lease })
    }
}

/// Maps described packets over a small region, for tests and fuzzing.
#[cfg(any(test, fuzzing))]
pub(super) fn fuzz_packets(described: &Packets) {
    let region = wirepath_memory::RegionBuilder::new(16 * wirepath_packet::STRIDE).shared().huge_pages(false).map();
    let file = region.expect("a region").descriptor().expect("shared").try_clone_to_owned().expect("a file");
    if let Ok((_, pool)) =
        Region::from_memfd(file).map_err(AttachError::from).and_then(|region| packets(region, described))
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
    fn end_reason_may_arrive_in_pieces() {
        let (mut server, socket) = UnixStream::pair().unwrap();
        let lease =
            Lease { socket: Mutex::new(Some(socket)), why: OnceLock::new(), destroyed: DestroyedFlag::default() };
        assert!(lease.is_live());
        let text = encode(&Reply::Refused("the port was stopped".to_owned())).unwrap();
        server.write_all(&(text.len() as u32).to_le_bytes()).unwrap();
        assert!(!lease.is_live());
        let rest = thread::spawn(move || {
            thread::sleep(Duration::from_millis(50));
            server.write_all(&text).unwrap();
        });
        assert_eq!(lease.read_end_reason(), "the port was stopped");
        assert!(!lease.is_live());
        rest.join().unwrap();
    }
}
