//! Loss and return of a device: a started port gives up its queues and starts the device again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::handoff::RingHandoff;
use super::{Port, PortError, PortEvent, Queues};
use wirepath_packet::counters::QueueCounters;

/// Interval between two attempts to start a lost device again.
const RETRY: Duration = Duration::from_millis(100);

/// One queue of a started port, as the control thread sees it.
pub(super) struct QueueSlot<Q> {
    pub(super) counters: Arc<QueueCounters>,
    pub(super) handoff: Arc<RingHandoff<Q, ()>>,
}

/// Relation of a started port to its device.
#[derive(Debug)]
pub(super) enum Presence {
    /// The device is there.
    Present,
    /// The device is lost, and the port waits for it.
    Away(Away),
}

/// State of a port whose device is lost.
#[derive(Debug)]
pub(super) struct Away {
    /// The workers have returned all queues, and the device is stopped.
    stopped: bool,
    /// Time of the next attempt to start the device.
    retry_at: Instant,
    /// Reason of the last attempt that failed for another reason than that the device is missing.
    refusal: String,
}

impl<Q> QueueSlot<Q> {
    /// Takes the queue back, if the worker does not have it.
    fn take(&self) -> Option<Q> {
        self.handoff.recall();
        self.handoff.take_returned()
    }
}

impl Port {
    /// Events since the last call. Cheap enough for a few calls a second.
    ///
    /// After [`PortEvent::Lost`] the workers give the queues of the driver back at their next poll. They drop the
    /// packets for the port and count them as `device_lost`. If the device can return
    /// ([`super::Device::can_return`]), this method starts it again, with the same configuration and rules, and
    /// reports [`PortEvent::Returned`].
    pub fn events(&mut self) -> Vec<PortEvent> {
        if matches!(self.presence, Presence::Away(_)) {
            return self.try_return();
        }
        let events = self.device.events();
        if self.device.can_return() && events.iter().any(|event| matches!(event, PortEvent::Lost(_))) {
            self.rx.iter().for_each(|slot| slot.handoff.recall());
            self.tx.iter().for_each(|slot| slot.handoff.recall());
            self.presence = Presence::Away(Away { stopped: false, retry_at: Instant::now(), refusal: String::new() });
        }
        events
    }

    /// Returns true while the device is lost and the port waits for its return.
    pub fn is_away(&self) -> bool {
        matches!(self.presence, Presence::Away(_))
    }

    /// Stops the device once all queues are returned, then tries to start it.
    fn try_return(&mut self) -> Vec<PortEvent> {
        let Presence::Away(away) = &mut self.presence else { return Vec::new() };
        if !away.stopped {
            let returned = self.rx.iter().all(|slot| slot.handoff.is_returned())
                && self.tx.iter().all(|slot| slot.handoff.is_returned());
            if !returned {
                return Vec::new();
            }
            let queues = Queues {
                rx: self.rx.iter().filter_map(QueueSlot::take).collect(),
                tx: self.tx.iter().filter_map(QueueSlot::take).collect(),
            };
            if let Err(error) = self.device.stop(queues) {
                tracing::debug!("port {}: stopping the lost device: {error}", self.name);
            }
            away.stopped = true;
        }
        if Instant::now() < away.retry_at {
            return Vec::new();
        }
        away.retry_at = Instant::now() + RETRY;
        let before = self.device.capabilities();
        let refusal = match self.device.restart(&self.config) {
            Ok(queues) if queues.rx.len() == self.rx.len() && queues.tx.len() == self.tx.len() => {
                self.hand_off(queues);
                self.presence = Presence::Present;
                let mut events = vec![PortEvent::Returned];
                let now = self.device.capabilities();
                events.extend(now.mac.filter(|_| now.mac != before.mac).map(PortEvent::Address));
                events.extend(now.mtu.filter(|_| now.mtu != before.mtu).map(PortEvent::Mtu));
                events.push(PortEvent::Link(self.device.link()));
                return events;
            }
            Ok(queues) => {
                let (rx, tx) = (queues.rx.len(), queues.tx.len());
                let _ = self.device.stop(queues);
                format!(
                    "it has {rx} receive queues and {tx} transmit queues, the port needs {} and {}",
                    self.rx.len(),
                    self.tx.len()
                )
            }
            Err(PortError::NoDevice { .. }) => return Vec::new(),
            Err(error) => error.to_string(),
        };
        if refusal != away.refusal {
            tracing::warn!("port {}: the device is there and cannot be started: {refusal}", self.name);
            away.refusal = refusal;
        }
        Vec::new()
    }

    /// Hands new queues of the driver to the workers. They continue the counters of the lost ones.
    fn hand_off(&self, queues: Queues) {
        for (slot, mut queue) in self.rx.iter().zip(queues.rx) {
            queue.set_counters(Arc::clone(&slot.counters));
            slot.handoff.hand_off(queue);
        }
        for (slot, mut queue) in self.tx.iter().zip(queues.tx) {
            queue.set_counters(Arc::clone(&slot.counters));
            slot.handoff.hand_off(queue);
        }
    }

    /// Returns the queues that the workers do not have, and whether the device must be stopped.
    pub(super) fn take_queues(&mut self) -> (Queues, bool) {
        let running = !matches!(&self.presence, Presence::Away(away) if away.stopped);
        let queues = Queues {
            rx: self.rx.iter().filter_map(QueueSlot::take).collect(),
            tx: self.tx.iter().filter_map(QueueSlot::take).collect(),
        };
        (queues, running)
    }
}
