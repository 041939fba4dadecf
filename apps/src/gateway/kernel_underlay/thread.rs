//! The thread that asks the kernel for next hops.

use std::collections::HashMap;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use wirepath_pmd::rtnetlink::{Malformed, Message, Received, Requests, Subscription, Table};

use super::table::{Changes, NextHopTable};
use crate::gateway::exchange::{self, lock};

/// Receive buffer of the notifications, in bytes.
const RECEIVE_BUFFER: usize = 16 << 20;
/// Most datagrams that one turn receives.
const DATAGRAMS: usize = 4096;
/// Most requests of one kind in a turn.
const REQUESTS: usize = 512;
/// Time between two turns without messages. Each next hop is reported as in use this often.
const INTERVAL: Duration = Duration::from_secs(1);
/// Time between two turns after the kernel refused a request.
const RETRY: Duration = Duration::from_millis(200);

/// Orders of the control thread.
#[derive(Debug, Default)]
pub(super) struct Orders {
    /// Name of the interface of the underlay port, if it is another one.
    pub(super) device: Option<String>,
    /// Destinations whose next hop is needed (true), or is not any more.
    pub(super) requests: HashMap<IpAddr, bool>,
    pub(super) stop: bool,
}

/// Figures for operators.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Status {
    pub(super) has_interface: bool,
    pub(super) destinations: usize,
    pub(super) next_hops: usize,
    pub(super) pending: usize,
    pub(super) messages: u64,
    pub(super) malformed: u64,
    pub(super) overflows: u64,
    pub(super) lookups: u64,
    pub(super) kept: u64,
    pub(super) errors: u64,
}

/// State of both threads.
pub(super) type Shared = exchange::Shared<Orders, Changes, Status>;

/// The state of the thread.
pub(super) struct Thread {
    shared: Arc<Shared>,
    subscription: Subscription,
    requests: Requests,
    table: NextHopTable,
    status: Status,
    /// The links are to be read.
    reads_links: bool,
    /// The next hop that was last reported as in use.
    kept: Option<IpAddr>,
    /// Time from which the next hops are reported as in use again.
    keep_at: Instant,
    /// Time until which nothing is asked, after an error.
    asks_from: Instant,
    is_degraded: bool,
}

impl Thread {
    /// Opens the sockets.
    pub(super) fn new(shared: Arc<Shared>) -> io::Result<Self> {
        let now = Instant::now();
        Ok(Self {
            shared,
            subscription: Subscription::with_routes(RECEIVE_BUFFER)?,
            requests: Requests::new()?,
            table: NextHopTable::default(),
            status: Status::default(),
            reads_links: true,
            kept: None,
            keep_at: now,
            asks_from: now,
            is_degraded: false,
        })
    }

    /// Runs until the control thread orders the end.
    pub(super) fn run(mut self) {
        loop {
            let now = Instant::now();
            let orders = self.shared.take_orders();
            if orders.stop {
                return;
            }
            if let Some(device) = orders.device {
                self.table.set_device(&device);
                self.reads_links = true;
            }
            for (to, is_needed) in orders.requests {
                self.table.set_needed(to, is_needed);
                if !is_needed {
                    lock(&self.shared.outbox).changes.remove(&to);
                }
            }
            if let Err(error) = self.turn(now) {
                self.asks_from = now + RETRY;
                self.complain(&error);
            }
            self.publish(now);
            self.wait();
        }
    }

    /// Counts an error. Logs it once, until everything works again.
    fn complain(&mut self, error: &io::Error) {
        self.status.errors += 1;
        if !std::mem::replace(&mut self.is_degraded, true) {
            tracing::error!("control = \"kernel\" of the underlay: {error}; it is tried again");
        }
    }

    /// Waits for a message of the kernel, an order or the next timer.
    fn wait(&self) {
        let now = Instant::now();
        let until = if self.table.has_work() || self.reads_links { self.asks_from } else { self.keep_at };
        let time = until.max(self.asks_from).saturating_duration_since(now).min(INTERVAL);
        self.shared.wait(&self.subscription, time);
    }

    fn turn(&mut self, now: Instant) -> io::Result<()> {
        self.receive()?;
        if now < self.asks_from {
            return Ok(());
        }
        if self.reads_links {
            let Self { requests, table, status, .. } = self;
            // An interface that comes meanwhile has a message of its own.
            requests.dump(Table::Links, read_into(table, status))?;
            self.reads_links = false;
        }
        let errors = self.status.errors;
        self.ask()?;
        let is_complete = self.keep_alive(now)?;
        if is_complete && self.status.errors == errors && std::mem::take(&mut self.is_degraded) {
            tracing::info!("control = \"kernel\" of the underlay works again");
        }
        Ok(())
    }

    /// Receives the waiting messages.
    fn receive(&mut self) -> io::Result<()> {
        let Self { subscription, table, status, .. } = self;
        match subscription.receive(DATAGRAMS, read_into(table, status))? {
            Received::All | Received::More => {}
            Received::Lost => {
                self.status.overflows += 1;
                self.reads_links = true;
                self.table.read_again();
            }
        }
        Ok(())
    }

    /// Looks up routes and reads neighbour entries.
    fn ask(&mut self) -> io::Result<()> {
        let interface = self.table.interface();
        for _ in 0..REQUESTS {
            let Some(to) = self.table.due() else { break };
            self.status.lookups += 1;
            let asked = if interface.is_some() { self.requests.route_to(to) } else { Ok(Vec::new()) };
            match asked {
                Ok(route) => self.table.set_route(to, &route),
                Err(error) => {
                    self.table.route_failed(to);
                    self.complain(&error);
                }
            }
        }
        for _ in 0..REQUESTS {
            let Some(hop) = self.table.unread() else { break };
            let entry = match interface {
                Some(interface) => self.requests.neighbour(interface, hop),
                None => Ok(None),
            };
            match entry {
                Ok(entry) => self.table.set_entry(hop, entry),
                Err(error) => {
                    self.table.entry_failed(hop);
                    self.complain(&error);
                    continue;
                }
            }
            // The kernel begins to solicit it now, not only when its turn comes.
            if let Some(interface) = interface
                && self.table.is_unresolved(hop)
            {
                self.use_neighbour(interface, hop)?;
            }
        }
        Ok(())
    }

    /// Reports next hops as in use, each once in [`INTERVAL`]. Returns true at the end of a round.
    fn keep_alive(&mut self, now: Instant) -> io::Result<bool> {
        if now < self.keep_at {
            return Ok(false);
        }
        for _ in 0..REQUESTS {
            let next = self.table.interface().zip(self.table.next_to_keep(self.kept));
            let Some((interface, hop)) = next else {
                (self.kept, self.keep_at) = (None, now + INTERVAL);
                self.table.retry();
                return Ok(true);
            };
            self.kept = Some(hop);
            // An entry that somebody has just made permanent must stay so.
            match self.requests.neighbour(interface, hop) {
                Ok(entry) => self.table.set_entry(hop, entry),
                Err(error) => {
                    self.complain(&error);
                    continue;
                }
            }
            if !self.table.is_fixed(hop) {
                self.use_neighbour(interface, hop)?;
            }
        }
        Ok(false)
    }

    fn use_neighbour(&mut self, interface: u32, hop: IpAddr) -> io::Result<()> {
        self.status.kept += 1;
        // Messages tell when an interface that is down can be used again.
        self.status.errors += u64::from(!self.requests.use_neighbour(interface, hop)?);
        Ok(())
    }

    /// Passes the changes to the control thread. `since` is the time of their messages.
    fn publish(&mut self, since: Instant) {
        if !self.table.changes.is_empty() {
            let changes = std::mem::take(&mut self.table.changes);
            self.shared.publish(since, |waiting| waiting.extend(changes));
        }
        (self.status.destinations, self.status.next_hops, self.status.pending) = self.table.counts();
        self.status.has_interface = self.table.interface().is_some();
        *lock(&self.shared.status) = self.status;
    }
}

/// Returns what takes messages of the kernel.
fn read_into(table: &mut NextHopTable, status: &mut Status) -> impl FnMut(Result<Message, Malformed>) {
    |message| {
        status.messages += 1;
        match message {
            Ok(message) => table.apply(&message),
            Err(Malformed) => status.malformed += 1,
        }
    }
}
