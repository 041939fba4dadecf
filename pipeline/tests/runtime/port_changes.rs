//! Ports that come and go while the workers run.

use std::time::Instant;

use wirepath_packet::drops::DropReason;
use wirepath_packet::{Batch, Pool, PortId};
use wirepath_pipeline::{
    Context, ControlPlane, NewPort, PacketBalance, PortInfo, PortSummary, Running, RuntimeConfig, RuntimeError, Summary,
};
use wirepath_pmd::drivers::PortSettings;
use wirepath_pmd::drivers::r#virtual::memory::Endpoint;
use wirepath_pmd::port::PortConfig;
use wirepath_settings::Source;

use crate::programs::{TIMEOUT, cables, frame, number, open};

fn settings(name: &str, cable: &str, queues: u16) -> PortSettings {
    let text = format!("[[port]]\nname = '{name}'\ndriver = 'memory'\ndevice = '{cable}'\nqueues = {queues}\n");
    let source = Source::new("test", text);
    let document = source.parse().unwrap();
    RuntimeConfig::ports_from_settings(&document.settings()).unwrap().pop().unwrap()
}

/// Joins the first two ports. All other ports send their packets back.
fn join_first_two(context: &mut Context<'_>, batch: &mut Batch) {
    let first = batch.as_slice().first().and_then(|packet| packet.in_port());
    let Some(port) = context.in_port().or(first) else { return };
    context.send_batch(if port.index() < 2 { port.paired() } else { port }, batch);
}

/// Opens a port in another thread, as a program does.
fn open_port(plane: &ControlPlane, name: &str, cable: &str, queues: u16) -> Result<NewPort, RuntimeError> {
    let opener = plane.port_opener().unwrap();
    let id = plane.new_port_ids(1)?[0];
    let settings = settings(name, cable, queues);
    std::thread::spawn(move || opener.open(id, settings, &[])).join().unwrap()
}

/// Runs the control thread until the ports have changed.
fn settle<S>(running: &mut Running<S>) {
    let begin = Instant::now();
    while running.plane().is_changing_ports() {
        assert!(begin.elapsed() < TIMEOUT);
        running.tick(&mut ());
        std::thread::yield_now();
    }
}

fn endpoint(cable: &str, pool: &Pool, queues: u16) -> Endpoint {
    let config = PortConfig { rx_queues: queues, tx_queues: queues, ..PortConfig::new(PortId::new(9), pool.clone()) };
    Endpoint::named(cable, &config).unwrap()
}

/// A numbered stream that another thread sends and receives.
struct Stream {
    from: Endpoint,
    to: Endpoint,
    sent: u64,
    received: u64,
}

impl Stream {
    /// Sends frames and checks that all that arrive are in order.
    fn pump(&mut self) {
        while self.sent - self.received < 300 && self.from.send_bytes(&frame(self.sent)) {
            self.sent += 1;
        }
        while let Some(packet) = self.to.receive() {
            assert_eq!(number(&packet), self.received, "no frame is lost or overtaken");
            self.received += 1;
        }
    }

    fn finish(&mut self) {
        let begin = Instant::now();
        while self.received < self.sent {
            assert!(begin.elapsed() < TIMEOUT, "{} of {} came", self.received, self.sent);
            while let Some(packet) = self.to.receive() {
                assert_eq!(number(&packet), self.received);
                self.received += 1;
            }
        }
    }
}

fn check(summary: &Summary) -> PacketBalance {
    assert!(summary.failures.is_empty(), "{summary}");
    assert_eq!(summary.leaked_buffers, 0, "{summary}");
    let balance = summary.balance();
    assert_eq!(balance.in_flight(), 0, "{balance:?}");
    balance
}

#[test]
fn a_thousand_ports_come_and_go_beside_a_stream() {
    const CYCLES: u64 = 1000;
    for workers in [1, 2] {
        let pool = Pool::new("far", 4096).unwrap();
        let test = format!("changes{workers}");
        let (runtime, from, to) = cables(&test, workers, &pool);
        let mut running = runtime.start(|_| join_first_two).unwrap();
        let stop = std::sync::atomic::AtomicBool::new(false);
        let (summary, echoed, sent) = std::thread::scope(|scope| {
            let (stop, test, pool) = (&stop, &test, &pool);
            let stream = scope.spawn(move || {
                let mut stream = Stream { from, to, sent: 0, received: 0 };
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    stream.pump();
                    std::thread::yield_now();
                }
                stream.finish();
                stream.sent
            });
            let mut echoed = 0;
            let mut highest = 0;
            for cycle in 0..CYCLES {
                let cable = format!("{test}-c{cycle}");
                let mut far = endpoint(&cable, pool, 1);
                let new = open_port(running.plane(), "c", &cable, 1).unwrap();
                let id = running.plane().add_port(new).unwrap();
                highest = highest.max(id.index());
                assert_eq!(running.plane().port("c").map(|port| port.id), Some(id));
                let begin = Instant::now();
                for n in 0..3 {
                    assert!(far.send_bytes(&frame(n)));
                }
                for n in 0..3 {
                    let back = std::iter::repeat_with(|| {
                        assert!(begin.elapsed() < TIMEOUT);
                        running.tick(&mut ());
                        std::thread::yield_now();
                        far.receive()
                    });
                    let packet = back.flatten().next().unwrap();
                    assert_eq!(number(&packet), n);
                    echoed += 1;
                }
                // More frames than the port may echo before it goes.
                for n in 0..cycle % 7 {
                    let _ = far.send_bytes(&frame(n));
                }
                assert!(running.plane().remove_port(id));
                assert!(!running.plane().remove_port(id), "it is gone");
                assert!(running.plane().port("c").is_none());
                let balance = running.plane().summary();
                assert!(balance.balance().received >= echoed, "the figures of the port stay");
                settle(&mut running);
            }
            assert!(highest < 64, "numbers are used again: {highest}");
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
            let sent = stream.join().unwrap();
            (running.stop(&mut ()), echoed, sent)
        });
        assert_eq!(echoed, 3 * CYCLES);
        let balance = check(&summary);
        assert!(sent > 0 && balance.sent >= sent + echoed, "{balance:?}");
        let removed = summary.ports.last().unwrap();
        assert_eq!((removed.name.as_str(), summary.ports.len()), (PortSummary::REMOVED, 3));
        assert!(removed.tx[0].packets >= echoed && removed.rx[0].packets >= echoed);
    }
}

#[test]
fn queues_go_to_the_workers_with_the_fewest() {
    let pool = Pool::new("far", 4096).unwrap();
    let (runtime, _from, _to) = cables("fewest", 2, &pool);
    let mut running = runtime.start(|_| join_first_two).unwrap();
    let queues = |running: &mut Running<_>| -> Vec<usize> {
        let workers = running.plane().worker_infos();
        workers.map(|worker| worker.rx_queues.len()).collect()
    };
    assert_eq!(queues(&mut running), [1, 1]);
    let mut far = endpoint("fewest-c", &pool, 4);
    let new = open_port(running.plane(), "c", "fewest-c", 4).unwrap();
    let c = running.plane().add_port(new).unwrap();
    assert_eq!(queues(&mut running), [3, 3]);
    settle(&mut running);
    for queue in 0..4 {
        let mut packet = pool.take().unwrap();
        assert!(packet.extend_from_slice(&frame(queue as u64), &pool));
        assert!(far.send_on(queue, packet).is_ok());
    }
    let begin = Instant::now();
    let mut back = 0;
    while back < 4 {
        assert!(begin.elapsed() < TIMEOUT);
        back += (0..4).filter_map(|queue| far.receive_from(queue)).count();
    }
    running.plane().remove_port(c);
    assert_eq!(queues(&mut running), [1, 1]);
    settle(&mut running);
    let summary = running.stop(&mut ());
    assert_eq!(check(&summary).sent, 4);
}

#[test]
fn a_number_is_used_again_when_no_packet_refers_to_it() {
    let pool = Pool::new("far", 4096).unwrap();
    let (runtime, mut from, _to) = cables("numbers", 2, &pool);
    // All packets of the first two ports go to port 2.
    let to_c = |context: &mut Context<'_>, batch: &mut Batch| context.send_batch(PortId::new(2), batch);
    let mut running = runtime.start(|_| to_c).unwrap();
    let mut far = endpoint("numbers-c", &pool, 1);
    let new = open_port(running.plane(), "c", "numbers-c", 1).unwrap();
    assert_eq!(new.info().id, PortId::new(2));
    let c = running.plane().add_port(new).unwrap();
    settle(&mut running);
    assert!(from.send_bytes(&frame(1)));
    assert_eq!(number(&far.receive_within(TIMEOUT).unwrap()), 1);

    running.plane().remove_port(c);
    assert_eq!(running.plane().new_port_ids(1).unwrap(), [PortId::new(3)], "not at once");
    assert!(running.plane().ports()[2].is_removed);
    settle(&mut running);
    for n in 0..5 {
        assert!(from.send_bytes(&frame(n)));
    }
    let begin = Instant::now();
    while running.plane().summary().drops().get(&DropReason::DeviceLost) != Some(&5) {
        assert!(begin.elapsed() < TIMEOUT, "packets for the removed port are dropped and counted");
    }
    while running.plane().new_port_ids(1).unwrap() != [c] {
        assert!(begin.elapsed() < TIMEOUT);
        running.tick(&mut ());
    }
    // The number of the new port belongs to another port, so nothing is sent to the old one.
    let mut other = endpoint("numbers-d", &pool, 1);
    let new = open_port(running.plane(), "d", "numbers-d", 1).unwrap();
    assert_eq!(running.plane().add_port(new).unwrap(), c);
    settle(&mut running);
    assert!(from.send_bytes(&frame(7)));
    assert_eq!(number(&other.receive_within(TIMEOUT).unwrap()), 7);
    assert!(far.receive().is_none());
    let balance = check(&running.stop(&mut ()));
    assert_eq!((balance.received, balance.sent, balance.dropped), (7, 2, 5));
}

#[test]
fn a_port_that_is_not_added_is_closed() {
    let pool = Pool::new("far", 4096).unwrap();
    let (runtime, _from, _to) = cables("unused", 1, &pool);
    let mut running = runtime.start(|_| join_first_two).unwrap();
    let _far = endpoint("unused-c", &pool, 1);
    let new = open_port(running.plane(), "c", "unused-c", 1).unwrap();
    let error = open_port(running.plane(), "d", "unused-c", 1).unwrap_err().to_string();
    assert!(error.contains("both ends of this cable are in use"), "{error}");
    drop(new);
    let new = open_port(running.plane(), "d", "unused-c", 1).unwrap();
    // Two ports with the same number.
    let again = open_port(running.plane(), "e", "unused-e", 1).unwrap();
    running.plane().add_port(new).unwrap();
    assert!(running.plane().add_port(again).is_err());
    let summary = running.stop(&mut ());
    assert_eq!(summary.ports.iter().map(|port| port.name.as_str()).collect::<Vec<_>>(), ["a", "b", "d"]);
    check(&summary);
}

#[test]
fn a_discarded_port_is_closed_in_another_thread() {
    let pool = Pool::new("far", 4096).unwrap();
    let (runtime, _from, _to) = cables("discarded", 1, &pool);
    let mut running = runtime.start(|_| join_first_two).unwrap();
    for stops in [false, true] {
        let _far = endpoint("discarded-c", &pool, 2);
        let new = open_port(running.plane(), "c", "discarded-c", 2).unwrap();
        let id = new.info().id;
        running.plane().discard_port(new);
        assert!(running.plane().is_changing_ports());
        assert_eq!(running.plane().summary().ports.len(), 2, "it was never a port of the program");
        if stops {
            break;
        }
        settle(&mut running);
        assert_eq!(running.plane().new_port_ids(1).unwrap(), [id]);
        drop(open_port(running.plane(), "c", "discarded-c", 2).unwrap());
    }
    let summary = running.stop(&mut ());
    assert_eq!(summary.ports.len(), 2);
    check(&summary);
}

#[test]
fn the_program_stops_in_the_middle_of_a_change() {
    for removals in [false, true] {
        let pool = Pool::new("far", 4096).unwrap();
        let (runtime, mut from, _to) = cables(&format!("middle{removals}"), 2, &pool);
        let mut running = runtime.start(|_| join_first_two).unwrap();
        for n in 0..100 {
            let _ = from.send_bytes(&frame(n));
            let new = open_port(running.plane(), "c", &format!("middle{removals}-{n}"), 2).unwrap();
            let id = running.plane().add_port(new).unwrap();
            if removals {
                running.plane().remove_port(id);
            }
        }
        let summary = running.stop(&mut ());
        // Ports that could not be closed before the stop are listed alone.
        assert!(if removals { summary.ports.len() >= 3 } else { summary.ports.len() == 102 });
        check(&summary);
    }
}

#[test]
fn a_program_has_a_limit_of_ports() {
    let runtime = open("[[port]]\nname = 'a'\ndriver = 'null'\n").unwrap();
    let mut running = runtime.start(|_| join_first_two).unwrap();
    let plane = running.plane();
    assert_eq!(plane.new_port_ids(1023).unwrap().len(), 1023);
    assert_eq!(plane.new_port_ids(1024).unwrap_err().to_string(), "1025 ports; at most 1024 are possible");
    let names: Vec<&PortInfo> = plane.ports().iter().filter(|port| !port.is_removed).collect();
    assert_eq!(names.len(), 1);
    check(&running.stop(&mut ()));
}
