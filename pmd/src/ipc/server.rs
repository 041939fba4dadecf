//! The server side of `attach`: offers a port, creates queues for clients, and ends their leases.

use std::any::Any;
use std::io::{ErrorKind, Read};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use wirepath_control_socket::{Access, Listener, Peer};
use wirepath_memory::fd_passing::{self, MAX_MESSAGE_BYTES};
use wirepath_verbs::DestroyedFlag;
use wirepath_verbs::mlx5::var::Var;

use super::config::AttachConfig;
use super::message::{AttachError, AttachRequest, Description, Inbox, Packets, Reply, Request, Status, encode};
use crate::drivers::nic::common::nic::{QueueContext, SharedQueue};
use crate::drivers::nic::common::quarantine::QueueTeardown;
use crate::drivers::nic::common::shared_nic::SharedNic;
use wirepath_packet::LeasedBuffers;

/// Most connections at a time.
const MAX_CLIENTS: usize = 16;
/// Time after which an idle connection without queues is closed: others wait in the backlog.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);
/// Time that clients have to detach when the port stops.
const DETACH_TIMEOUT: Duration = Duration::from_millis(500);

/// Queues and buffers of a client. Dropping it destroys the queues and returns the buffers to the pool.
pub(crate) struct Lease {
    teardown: QueueTeardown,
    buffers: Option<LeasedBuffers>,
    rx_queues: u16,
    /// The VAR, which is revoked before anything else.
    var: Option<Var>,
}

impl Lease {
    /// Separates the buffers, which the client may use until it has confirmed the end of its queues.
    fn split_buffers(&mut self) -> Self {
        Self { teardown: self.teardown.without_hardware(), buffers: self.buffers.take(), rx_queues: 0, var: None }
    }

    /// Leaks the buffers: a client that does not respond may still write to them.
    fn leak(mut self) {
        if let Some(buffers) = self.buffers.take() {
            let count = buffers.count();
            self.teardown.leak(buffers, count);
        }
    }

    fn end(&mut self) {
        self.var = None;
        if let Some(buffers) = self.buffers.take() {
            let count = buffers.count();
            self.teardown.release(buffers, count);
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.end();
    }
}

/// Receive queues of the port that are shared with a client, as part of its RSS.
pub(crate) struct RxSharing<A> {
    /// Requested number of shared receive queues.
    pub(crate) requested: u16,
    /// True if RSS must be rebuilt over the requested number of queues.
    pub(crate) rebuild_due: bool,
    /// The created queues.
    created: Vec<SharedQueue<A>>,
    /// Leases that end once RSS no longer delivers to their queues.
    leaving: Vec<Lease>,
}

impl<A> Default for RxSharing<A> {
    fn default() -> Self {
        Self { requested: 0, rebuild_due: false, created: Vec::new(), leaving: Vec::new() }
    }
}

impl<A> RxSharing<A> {
    fn request(&mut self, queues: u16) {
        (self.requested, self.rebuild_due) = (queues, true);
    }

    /// Releases the shared queues before RSS is torn down, which then holds the last reference to them.
    pub(crate) fn drop_queues(&mut self) {
        self.created.clear();
        self.leaving.iter_mut().for_each(|lease| lease.teardown.drop_hardware());
    }

    /// Ends the leases after RSS was torn down: their buffers are free now.
    pub(crate) fn end_leases(&mut self) {
        self.leaving.clear();
    }

    /// Records that RSS was rebuilt with these shared queues.
    pub(crate) fn rebuilt(&mut self, created: Vec<SharedQueue<A>>) {
        (self.created, self.rebuild_due) = (created, false);
    }
}

/// Stages of a connection.
enum ClientState {
    /// Has requested nothing, or only the status.
    Connected,
    /// Waits until its receive queues are created.
    Preparing(Lease, Vec<serde_json::Value>),
    Attached(Lease),
    /// Has finished or must end; its receive queues are about to be destroyed.
    Leaving(Lease),
    /// Its queues have ended. The buffers stay leased until the client closes its socket, which it does after
    /// its last packet.
    Detached(Lease),
    Closed,
}

/// A client connection.
struct Client {
    socket: UnixStream,
    peer: Peer,
    inbox: Inbox,
    state: ClientState,
    /// Time of its last request.
    last_request: Instant,
}

/// Serves the clients of a port.
pub(crate) struct AttachServer {
    /// `None` once the port stops.
    listener: Option<Listener>,
    config: AttachConfig,
    clients: Vec<Client>,
    /// Number of attached clients at the start of this poll.
    attached: u64,
    attached_total: u64,
    lost: u64,
}

/// Inputs of one poll of the server.
pub(crate) struct ServeContext<'a, N: SharedNic> {
    pub(crate) nic: &'a N,
    pub(crate) context: QueueContext<'a, N>,
    pub(crate) sharing: &'a mut RxSharing<N::RxQueueSpans>,
    /// State of the port, without the fields about clients.
    pub(crate) status: &'a Status,
}

impl AttachServer {
    /// Listens on the configured socket. Replaces the socket of a process that was killed.
    pub(crate) fn listen(config: &AttachConfig) -> std::io::Result<Self> {
        // Clients get the memory of the port, so the socket is for its user alone.
        let listener = Some(Listener::bind(&config.socket, &Access::default())?);
        Ok(Self { listener, config: config.clone(), clients: Vec::new(), attached: 0, attached_total: 0, lost: 0 })
    }

    /// Returns the number of clients: attached now, attached ever, and lost without a `Done` message.
    pub(crate) fn counts(&self) -> [u64; 3] {
        let attached = self.clients.iter().filter(|client| matches!(client.state, ClientState::Attached(_))).count();
        [attached as u64, self.attached_total, self.lost]
    }

    /// Serves all clients; never blocks.
    pub(crate) fn serve<N: SharedNic>(&mut self, cx: &mut ServeContext<'_, N>) {
        self.accept();
        [self.attached, ..] = self.counts();
        let mut clients = std::mem::take(&mut self.clients);
        for client in &mut clients {
            self.poll_client(client, cx);
        }
        clients.retain(|client| !matches!(client.state, ClientState::Closed));
        self.clients = clients;
    }

    /// Ends the leases of clients with receive queues, because the port's own receive queues are about to be
    /// recreated.
    pub(crate) fn evict<A>(&mut self, sharing: &mut RxSharing<A>) {
        for client in &mut self.clients {
            if let ClientState::Attached(lease) | ClientState::Preparing(lease, _) = &client.state
                && lease.rx_queues > 0
            {
                self.lost += u64::from(client.detach(sharing));
            }
        }
    }

    /// Ends all leases, because the device failed or the port stops. Attached clients get the reason as the
    /// last message.
    pub(crate) fn end<A>(&mut self, sharing: &mut RxSharing<A>, why: &str) {
        for client in &mut self.clients {
            if client.detach(sharing) {
                client.send(&Reply::Refused(why.to_owned()), &[]);
            }
            let _ = client.socket.shutdown(Shutdown::Write);
        }
        (sharing.requested, sharing.rebuild_due) = (0, false);
    }

    fn accept(&mut self) {
        while self.clients.len() < MAX_CLIENTS
            && let Some((socket, peer)) = self.listener.as_ref().and_then(Listener::accept)
        {
            // Space for the longest reply, so that sending never blocks.
            let _ = rustix::net::sockopt::set_socket_send_buffer_size(&socket, 2 * MAX_MESSAGE_BYTES);
            if peer.is_owner() {
                self.clients.push(Client {
                    socket,
                    peer,
                    inbox: Inbox::default(),
                    state: ClientState::Connected,
                    last_request: Instant::now(),
                });
            }
        }
    }

    fn poll_client<N: SharedNic>(&mut self, client: &mut Client, cx: &mut ServeContext<'_, N>) {
        let outcome = client.read();
        while let Some(request) = client.inbox.next() {
            client.last_request = Instant::now();
            let state = std::mem::replace(&mut client.state, ClientState::Closed);
            client.state = match (request, state) {
                (Ok(Request::Look), state) => {
                    client.state = state;
                    let status = self.status(cx.status);
                    if !client.send(&Reply::Status(Box::new(status)), &[]) {
                        self.disconnect(client, cx);
                    }
                    continue;
                }
                (Ok(Request::Attach(wanted)), ClientState::Connected) => match self.prepare(&wanted, cx) {
                    Ok((lease, tx)) => ClientState::Preparing(lease, tx),
                    Err(why) => {
                        client.send(&Reply::Refused(why), &[]);
                        ClientState::Closed
                    }
                },
                (Ok(Request::Done), ClientState::Attached(lease)) => ClientState::Leaving(leave(lease, cx.sharing)),
                // The server has already ended the lease.
                (Ok(Request::Done), state @ (ClientState::Leaving(_) | ClientState::Detached(_))) => state,
                (request, state) => {
                    let why = match request {
                        Ok(request) => format!("{request:?} is not allowed in this state"),
                        Err(error) => error.to_string(),
                    };
                    client.state = state;
                    client.send(&Reply::Refused(why), &[]);
                    self.disconnect(client, cx);
                    continue;
                }
            };
        }
        if outcome != ReadOutcome::Open {
            self.disconnect(client, cx);
        }
        client.state = match std::mem::replace(&mut client.state, ClientState::Closed) {
            ClientState::Connected if client.last_request.elapsed() > IDLE_TIMEOUT => ClientState::Closed,
            ClientState::Preparing(lease, tx) if !cx.sharing.rebuild_due => self.complete(client, lease, tx, cx),
            ClientState::Leaving(lease) if !cx.sharing.rebuild_due => {
                client.send(&Reply::Ended, &[]);
                ClientState::Detached(lease)
            }
            state => state,
        };
        if outcome == ReadOutcome::Closed && matches!(client.state, ClientState::Detached(_)) {
            client.state = ClientState::Closed;
        }
    }

    /// Ends the lease of a client that disconnected or violated the protocol.
    fn disconnect<N: SharedNic>(&mut self, client: &mut Client, cx: &mut ServeContext<'_, N>) {
        if client.detach(cx.sharing) {
            self.lost += 1;
            let (device, peer) = (&cx.status.device, client.peer);
            tracing::warn!("{device}: an attached process ({peer}) is gone; its queues are destroyed");
        }
    }

    /// Creates everything that a client requests, except receive queues: these need RSS to be rebuilt.
    fn prepare<N: SharedNic>(
        &mut self,
        wanted: &AttachRequest,
        cx: &mut ServeContext<'_, N>,
    ) -> Result<(Lease, Vec<serde_json::Value>), String> {
        let AttachConfig { tx_queues, rx_queues, buffers, .. } = self.config;
        let within = |what: &str, key: &str, wanted: u32, limit: u32| match wanted <= limit {
            true => Ok(()),
            false => Err(format!("{wanted} {what} requested; at most {limit} are offered (`{key}` of the port)")),
        };
        within("transmit queues", "attach_tx_queues", wanted.tx_queues.into(), tx_queues.into())?;
        within("receive queues", "attach_rx_queues", wanted.rx_queues.into(), rx_queues.into())?;
        within("buffers", "attach_buffers", wanted.buffers, buffers)?;
        if wanted.rx_queues > 0 && (cx.sharing.requested > 0 || cx.sharing.rebuild_due) {
            return Err("another process has receive queues of this port, or is returning them".to_owned());
        }
        let pool = &cx.context.config.pool;
        let buffers = pool.lease(wanted.buffers.max(1));
        let buffers =
            buffers.ok_or_else(|| format!("pool '{}' has fewer than {} free buffers", pool.name(), wanted.buffers))?;
        let (mut keep, mut destroyed_flags, mut tx) =
            (Vec::<Box<dyn Any + Send + Sync>>::new(), Vec::<DestroyedFlag>::new(), Vec::new());
        for index in 0..usize::from(wanted.tx_queues) {
            let made = cx.nic.share_tx(&cx.context, index).map_err(|error| error.to_string())?;
            keep.push(made.keep);
            destroyed_flags.push(made.destroyed);
            tx.push(serde_json::to_value(made.at).map_err(|error| error.to_string())?);
        }
        if wanted.rx_queues > 0 {
            cx.sharing.request(wanted.rx_queues);
        }
        let teardown = QueueTeardown::new(Box::new(keep), destroyed_flags, cx.context.quarantine);
        Ok((Lease { teardown, buffers: Some(buffers), rx_queues: wanted.rx_queues, var: None }, tx))
    }

    /// Completes an attach request by sending the description.
    fn complete<N: SharedNic>(
        &mut self,
        client: &Client,
        mut lease: Lease,
        tx: Vec<serde_json::Value>,
        cx: &mut ServeContext<'_, N>,
    ) -> ClientState {
        self.attached_total += 1;
        let described = self.describe(client, &mut lease, tx, cx);
        match described {
            Ok(()) => {
                tracing::info!("{}: a process has attached ({})", cx.status.device, client.peer);
                ClientState::Attached(lease)
            }
            Err(error) => {
                client.send(&Reply::Refused(error.to_string()), &[]);
                self.lost += 1;
                ClientState::Leaving(leave(lease, cx.sharing))
            }
        }
    }

    fn describe<N: SharedNic>(
        &self,
        client: &Client,
        lease: &mut Lease,
        tx: Vec<serde_json::Value>,
        cx: &mut ServeContext<'_, N>,
    ) -> Result<(), AttachError> {
        let QueueContext { opened, memory, config, .. } = cx.context;
        let value = |error: serde_json::Error| AttachError::Description(error.to_string());
        let mut rx = Vec::new();
        if lease.rx_queues > 0 {
            let made: Vec<_> = std::mem::take(&mut cx.sharing.created);
            if made.len() != usize::from(lease.rx_queues) {
                return Err(AttachError::Refused("the device could not create receive queues for it".to_owned()));
            }
            let rings = made.iter().map(|lent| serde_json::to_value(&lent.at));
            rx = rings.collect::<Result<_, _>>().map_err(value)?;
            // The RSS group also holds these queues. Both references must be dropped before their buffers are
            // free.
            let (keep, destroyed_flags) =
                made.into_iter().map(|lent| (lent.keep, lent.destroyed)).unzip::<_, _, Vec<_>, Vec<_>>();
            lease.teardown.extend(Box::new(keep), destroyed_flags);
        }
        let regions = opened.allocator.regions()?;
        let pool = &config.pool;
        let lent = lease.buffers.as_ref().map(LeasedBuffers::ranges).unwrap_or_default();
        let var = N::alloc_var(&opened.verbs).map_err(|error| error.to_string());
        let exported =
            var.as_ref().map_err(Clone::clone).and_then(|var| var.export().map_err(|error| error.to_string()));
        let description = Description {
            status: self.status(cx.status),
            packets: Packets {
                address: pool.region().base().as_ptr() as u64,
                bytes: pool.region().bytes(),
                lkey: N::lkey(memory),
                offset: pool.region_offset(),
                span: pool.region_buffers(),
                lent,
            },
            domain: opened.domain.handle(),
            registration: N::mr_handle(memory),
            regions: regions.len(),
            common: serde_json::to_value(cx.nic.common(memory, config)).map_err(value)?,
            tx,
            rx,
            var: exported.as_ref().map(|var| var.bytes.clone()).map_err(Clone::clone),
        };
        let mut files: Vec<BorrowedFd<'_>> = vec![opened.context.cmd_fd()];
        files.extend(pool.region().descriptor());
        files.extend(regions.iter().filter_map(|region| region.descriptor.as_ref()).map(AsFd::as_fd));
        files.extend(exported.iter().map(|var| var.liveness));
        let message = encode(&Reply::Attached(Box::new(description)))?;
        fd_passing::send(&client.socket, &message, &files)?;
        drop(exported);
        lease.var = var.ok();
        Ok(())
    }

    fn status(&self, plain: &Status) -> Status {
        let AttachConfig { tx_queues, rx_queues, buffers, .. } = self.config;
        let offered = AttachRequest { tx_queues, rx_queues, buffers };
        let (attached, attached_ever, lost) = (self.attached, self.attached_total, self.lost);
        Status { offered, attached, attached_ever, lost, ..plain.clone() }
    }
}

impl Drop for AttachServer {
    fn drop(&mut self) {
        self.listener = None;
        // Clients that watch their socket have some time to detach.
        let begin = Instant::now();
        for mut client in self.clients.drain(..) {
            let lease = match std::mem::replace(&mut client.state, ClientState::Closed) {
                ClientState::Leaving(lease) | ClientState::Detached(lease) => lease,
                ClientState::Attached(mut lease) | ClientState::Preparing(mut lease, _) => lease.split_buffers(),
                ClientState::Connected | ClientState::Closed => continue,
            };
            let _ = client.socket.shutdown(Shutdown::Write);
            while client.read() != ReadOutcome::Closed {
                if begin.elapsed() > DETACH_TIMEOUT {
                    lease.leak();
                    break;
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }
}

/// Ends the lease of a client. Receive queues end once RSS no longer delivers to them. Returns the part with
/// the buffers.
fn leave<A>(mut lease: Lease, sharing: &mut RxSharing<A>) -> Lease {
    let rest = lease.split_buffers();
    if lease.rx_queues > 0 {
        sharing.request(0);
        sharing.leaving.push(lease);
    }
    rest
}

/// Result of reading a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReadOutcome {
    Open,
    Invalid,
    Closed,
}

impl Client {
    /// Reads what has arrived.
    fn read(&mut self) -> ReadOutcome {
        let mut bytes = [0; 512];
        // The bound keeps a client that sends endlessly from blocking the others.
        for _ in 0..16 {
            match self.socket.read(&mut bytes) {
                Ok(0) => return ReadOutcome::Closed,
                // Requests in these stages are ignored.
                Ok(_)
                    if matches!(
                        self.state,
                        ClientState::Leaving(_) | ClientState::Detached(_) | ClientState::Closed
                    ) => {}
                Ok(n) => {
                    if let Err(error) = self.inbox.take(&bytes[..n]) {
                        self.send(&Reply::Refused(error.to_string()), &[]);
                        return ReadOutcome::Invalid;
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return ReadOutcome::Open,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return ReadOutcome::Closed,
            }
        }
        ReadOutcome::Open
    }

    /// Ends the lease of the client. Returns true if it had one.
    fn detach<A>(&mut self, sharing: &mut RxSharing<A>) -> bool {
        let state = std::mem::replace(&mut self.state, ClientState::Closed);
        let had = matches!(state, ClientState::Attached(_) | ClientState::Preparing(..));
        self.state = match state {
            ClientState::Attached(lease) | ClientState::Preparing(lease, _) => {
                ClientState::Leaving(leave(lease, sharing))
            }
            ClientState::Connected => ClientState::Closed,
            state => state,
        };
        had
    }

    /// Sends a reply. Returns false if the client does not read or is gone.
    fn send(&self, reply: &Reply, files: &[BorrowedFd<'_>]) -> bool {
        encode(reply).is_ok_and(|bytes| fd_passing::send(&self.socket, &bytes, files).is_ok())
    }
}
