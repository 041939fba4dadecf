//! Whole programs on in-process cables: order, loss, worker hand-off, stop under traffic, exhaustion, panics.

use std::time::{Duration, Instant};
use wirepath_packet::PortId;

use wirepath_packet::drops::DropReason;
use wirepath_packet::{Batch, Packet, Pool};
use wirepath_pipeline::{
    Context, Control, ControlPlane, Punt, RunOptions, Running, Runtime, RuntimeConfig, RuntimeError, Stage,
};
use wirepath_pmd::drivers::r#virtual::memory::Endpoint;
use wirepath_pmd::port::PortConfig;
use wirepath_settings::Source;

/// Maximum time of a test step. A passing test does not wait for it.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

pub(crate) fn open(text: &str) -> Result<Runtime, RuntimeError> {
    let source = Source::new("test", text);
    let document = source.parse().unwrap();
    let top = document.settings();
    let ports = RuntimeConfig::ports_from_settings(&top).unwrap();
    let mut config = RuntimeConfig::from_settings(&top).unwrap();
    config.buffers = config.buffers.min(4096);
    let workers = top.integer("test_workers", 1..=8).unwrap().unwrap_or(1);
    top.finish().unwrap();
    // Workers are not pinned, because tests run in parallel.
    config.workers = vec![None; workers];
    Runtime::open(ports, config)
}

/// Returns a runtime with two memory ports, `a` (0) and `b` (1), and the far ends of their cables.
pub(crate) fn cables(test: &str, workers: usize, pool: &Pool) -> (Runtime, Endpoint, Endpoint) {
    let port = |name: &str| format!("[[port]]\nname = '{name}'\ndriver = 'memory'\ndevice = '{test}-{name}'\n");
    let runtime = open(&format!("test_workers = {workers}\n{}{}", port("a"), port("b"))).unwrap();
    let end = |name: &str| {
        Endpoint::named(&format!("{test}-{name}"), &PortConfig::new(PortId::new(9), pool.clone())).unwrap()
    };
    (runtime, end("a"), end("b"))
}

pub(crate) fn frame(number: u64) -> [u8; 64] {
    let mut frame = [0x5a; 64];
    frame[..8].copy_from_slice(&number.to_be_bytes());
    frame
}

pub(crate) fn number(packet: &Packet) -> u64 {
    u64::from_be_bytes(*packet.data().first_chunk().expect("as sent"))
}

/// Sends `n` numbered frames into `from` and receives them from `to`, with at most a few hundred in flight.
/// Every frame must arrive, in order.
pub(crate) fn pass(n: u64, from: &mut Endpoint, to: &mut Endpoint, mut meanwhile: impl FnMut()) {
    let (mut sent, mut got, begin) = (0, 0, Instant::now());
    while got < n {
        assert!(begin.elapsed() < TIMEOUT, "{sent} sent, {got} came");
        while sent < n && sent - got < 300 && from.send_bytes(&frame(sent)) {
            sent += 1;
        }
        match to.receive() {
            Some(packet) => {
                assert_eq!((number(&packet), packet.len()), (got, 64));
                got += 1;
            }
            None => {
                meanwhile();
                std::thread::yield_now();
            }
        }
    }
    assert!(to.receive().is_none(), "nothing else");
}

/// Waits for a condition, which must come true.
#[track_caller]
pub(crate) fn wait_until(mut condition: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(begin.elapsed() < TIMEOUT, "the condition stays false");
        std::thread::yield_now();
    }
}

pub(crate) fn cross(context: &mut Context<'_>, batch: &mut Batch) {
    let port = context.in_port().expect("nobody hands over");
    context.send_batch(port.paired(), batch);
}

pub(crate) fn stop<S>(running: Running<S>) -> wirepath_pipeline::Summary {
    let summary = running.stop(&mut ());
    assert_eq!(summary.leaked_buffers, 0);
    summary
}

#[test]
fn no_packet_is_lost_or_reordered() {
    let pool = Pool::new("test", 2048).unwrap();
    let (runtime, mut a, mut b) = cables("order", 1, &pool);
    let running = runtime.start(|_| cross).unwrap();
    pass(20_000, &mut a, &mut b, || ());
    pass(5000, &mut b, &mut a, || ());
    let summary = stop(running);
    assert_eq!((summary.rx().packets, summary.tx().packets), (25_000, 25_000));
    assert!(summary.drops().is_empty() && summary.failures.is_empty());
    let json = summary.to_json();
    assert_eq!((&json["rx_packets"], &json["tx_packets"]), (&25_000.into(), &25_000.into()));
    assert_eq!(json["ports"][0]["rx_bytes"], 20_000 * 64);
    assert_eq!(json["ports"][1]["tx_queues"][0]["packets"], 20_000);
    drop((a, b));
    assert_eq!(pool.outstanding(), 0);
}

#[test]
fn workers_forward_in_order_to_every_port() {
    let pool = Pool::new("test", 2048).unwrap();
    let (runtime, mut a, mut b) = cables("hand", 2, &pool);
    // Worker 0 polls port a, and worker 1 polls port b. Each port has one transmit queue. Packets from a are
    // first enqueued to worker 1. Packets from b are sent by a, whose queue belongs to worker 0.
    let running = runtime
        .start(|worker| {
            assert_eq!(worker.rx_queues, [(PortId::new(worker.index as u16), 0)]);
            |context: &mut Context<'_>, batch: &mut Batch| match context.in_port() {
                Some(port) if port == PortId::new(0) => {
                    batch.drain_front(batch.len(), |packet| context.enqueue_to_worker(1, packet));
                }
                Some(_) => batch.iter_mut().for_each(|packet| packet.set_out_port(PortId::new(0))),
                None => {
                    assert_eq!(context.worker(), 1);
                    batch.iter_mut().for_each(|packet| packet.set_out_port(PortId::new(1)));
                }
            }
        })
        .unwrap();
    pass(10_000, &mut a, &mut b, || ());
    pass(10_000, &mut b, &mut a, || ());
    // Sleeping workers are woken for enqueued packets.
    for _ in 0..20 {
        std::thread::sleep(Duration::from_millis(3));
        pass(1, &mut a, &mut b, || ());
    }
    let summary = stop(running);
    assert_eq!(summary.workers[0].handed_over, 10_020);
    assert_eq!(summary.workers[1].handed_over, 10_000);
    assert!(summary.workers.iter().all(|worker| worker.sleeps > 0), "adaptive is the default");
    assert!(summary.drops().is_empty());
    drop((a, b));
    assert_eq!(pool.outstanding(), 0);
}

const NULLS: &str = "[[port]]\nname = 'a'\ndriver = 'null'\n[port.null]\nsource = 'udp4'\nflows = 10\n\
                     [[port]]\nname = 'b'\ndriver = 'null'\n[port.null]\nsource = 'udp4'\nflows = 10\n";

#[test]
fn every_packet_is_counted_when_traffic_is_stopped() {
    let runtime = open(&format!("test_workers = 2\n{NULLS}")).unwrap();
    let running = runtime
        .start(|_| {
            |context: &mut Context<'_>, batch: &mut Batch| {
                let other = 1 - context.worker();
                if context.in_port().is_some() {
                    batch.drain_front(8, |packet| context.enqueue_to_worker(other, packet));
                    batch.drain_front(1, |packet| context.drop(packet, DropReason::RuleDrop));
                }
                // Some packets go to a port whose transmit queue belongs to the other worker.
                batch.iter_mut().enumerate().for_each(|(i, packet)| packet.set_out_port(PortId::new(i as u16 % 2)));
            }
        })
        .unwrap();
    wait_for(&running, |rx, _| rx > 200_000);
    let summary = stop(running);
    let dropped: u64 = summary.drops().values().sum();
    assert_eq!(summary.rx().packets, summary.tx().packets + dropped, "{summary}");
    assert!(summary.drops()[&DropReason::RuleDrop] > 0);
}

/// Waits until the numbers of received and sent packets satisfy `done`.
fn wait_for<S>(running: &Running<S>, done: impl Fn(u64, u64) -> bool) {
    let begin = Instant::now();
    loop {
        let snapshot = running.snapshot();
        let rx = snapshot.ports.iter().flat_map(|(_, rx, _)| rx).map(|queue| queue.packets).sum();
        let tx = snapshot.ports.iter().flat_map(|(_, _, tx)| tx).map(|queue| queue.packets).sum();
        if done(rx, tx) {
            return;
        }
        assert!(begin.elapsed() < TIMEOUT, "{rx} received, {tx} sent");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A stage that keeps every packet until it is told to release them.
struct Holder {
    packets: Vec<Packet>,
    let_go: bool,
}

impl Stage for Holder {
    fn process(&mut self, context: &mut Context<'_>, batch: &mut Batch) {
        if self.let_go {
            self.packets.clear();
            context.send_batch(PortId::new(0), batch);
        } else {
            batch.drain_front(batch.len(), |packet| self.packets.push(packet));
        }
    }
}

#[test]
fn an_exhausted_pool_is_counted_and_recovers() {
    let runtime = open(&format!("{NULLS}[pool]\nbuffers = 64\n")).unwrap();
    let running = runtime.start(|_| Holder { packets: Vec::new(), let_go: false }).unwrap();
    let dry = |running: &Running<Holder>| {
        let snapshot = running.snapshot();
        snapshot
            .ports
            .iter()
            .flat_map(|(_, rx, _)| rx)
            .any(|queue| queue.drops.iter().any(|d| d.0 == DropReason::NoBuffer))
    };
    let begin = Instant::now();
    while !dry(&running) {
        assert!(begin.elapsed() < TIMEOUT);
        std::thread::sleep(Duration::from_millis(1));
    }
    wait_for(&running, |rx, tx| rx == 64 && tx == 0);
    // The stage gets no more batches, so a job on the worker releases the packets.
    assert!(running.on_worker(0, |stage| {
        stage.let_go = true;
        stage.packets.clear();
    }));
    wait_for(&running, |_, tx| tx > 10_000);
    let summary = stop(running);
    assert!(summary.drops()[&DropReason::NoBuffer] > 0);
    assert_eq!(summary.rx().packets, summary.tx().packets + 64);
}

#[test]
fn a_panic_ends_the_program_cleanly_and_is_reported() {
    let runtime = open(&format!("test_workers = 2\n{NULLS}")).unwrap();
    let mut batches = 0;
    let stage = move |context: &mut Context<'_>, batch: &mut Batch| {
        batches += 1;
        assert!(context.worker() == 0 || batches < 100, "a defect in a stage");
        context.send_batch(PortId::new(0), batch);
    };
    let summary = runtime.run(|_| stage, &mut (), &RunOptions::default()).unwrap();
    assert_eq!(summary.failures.len(), 1);
    assert!(summary.failures[0].starts_with("worker 1 panicked: a defect in a stage"), "{:?}", summary.failures);
    assert_eq!(summary.leaked_buffers, 0, "the batch was freed while the stack unwound");
    assert!(summary.to_string().contains("a defect in a stage"));
}

/// A control thread that sends punted packets back.
struct Echo(u64);

impl Control for Echo {
    fn punt(&mut self, punt: Punt, plane: &mut ControlPlane) {
        assert_eq!((punt.code, punt.worker), (7, 0));
        let port = punt.packet.in_port().unwrap();
        plane.send(port, punt.packet);
        self.0 += 1;
    }

    fn summary(&mut self) -> Option<serde_json::Value> {
        Some(self.0.into())
    }
}

#[test]
fn punted_packets_reach_the_control_thread_and_return() {
    let pool = Pool::new("test", 2048).unwrap();
    let (runtime, mut a, _b) = cables("punt", 1, &pool);
    let mut running = runtime
        .start(|_| {
            |context: &mut Context<'_>, batch: &mut Batch| {
                batch.drain_front(batch.len(), |packet| context.punt(packet, 7));
            }
        })
        .unwrap();
    let mut control = Echo(0);
    let (mut sent, mut got, begin) = (0, 0, Instant::now());
    while got < 2000 {
        assert!(begin.elapsed() < TIMEOUT);
        if sent < 2000 && sent - got < 200 && a.send_bytes(&frame(sent)) {
            sent += 1;
        }
        running.tick(&mut control);
        if let Some(packet) = a.receive() {
            assert_eq!(number(&packet), got);
            got += 1;
        }
    }
    let summary = running.stop(&mut control);
    assert_eq!((summary.workers[0].punted, summary.app), (2000, Some(2000.into())));
}

#[test]
fn packets_without_a_destination_are_counted() {
    let pool = Pool::new("test", 256).unwrap();
    let (runtime, mut a, _b) = cables("astray", 1, &pool);
    let running = runtime
        .start(|_| {
            |_: &mut Context<'_>, batch: &mut Batch| {
                for packet in batch.iter_mut() {
                    match packet.data()[7] {
                        1 => packet.set_out_port(PortId::new(77)),
                        2 => packet.set_out_port(PortId::new(0)),
                        _ => {}
                    }
                }
            }
        })
        .unwrap();
    (0..4).for_each(|i| assert!(a.send_bytes(&frame(i))));
    assert_eq!(number(&a.receive_within(TIMEOUT).expect("number 2 comes back")), 2);
    wait_for(&running, |rx, _| rx == 4);
    let summary = stop(running);
    let drops: Vec<_> = summary.drops().into_iter().collect();
    assert_eq!(drops, [(DropReason::TxError, 1), (DropReason::NoOutputPort, 2)]);
}

#[test]
fn rules_that_cannot_run_are_refused_with_a_reason() {
    let error = |text: &str| open(text).expect_err("refused").to_string();
    assert!(error("").contains("at least one [[port]]"));
    let message = error(&format!("test_workers = 3\n{NULLS}"));
    assert!(message.starts_with("3 workers, but the ports have only 2 receive queues"), "{message}");
    let config = RuntimeConfig { workers: vec![Some(1000)], ..RuntimeConfig::default() };
    let source = Source::new("test", NULLS);
    let document = source.parse().unwrap();
    let ports = RuntimeConfig::ports_from_settings(&document.settings()).unwrap();
    let message = Runtime::open(ports, config).expect_err("refused").to_string();
    assert!(message.starts_with("core 1000 cannot be used; this program may run on cores 0"), "{message}");
}

#[test]
fn queues_of_a_port_are_divided_among_workers() {
    let port = |name: &str| {
        format!("[[port]]\nname = '{name}'\ndriver = 'null'\nqueues = 3\n[port.null]\nsource = 'untouched'\n")
    };
    let runtime = open(&format!("test_workers = 2\n{}{}", port("a"), port("b"))).unwrap();
    let mut queues = Vec::new();
    let running = runtime
        .start(|worker| {
            queues.push(worker.rx_queues.clone());
            cross
        })
        .unwrap();
    assert_eq!(
        queues,
        [[(0, 0), (0, 2), (1, 1)], [(0, 1), (1, 0), (1, 2)]]
            .map(|queues| queues.map(|(port, queue)| (PortId::new(port), queue)))
    );
    wait_for(&running, |rx, _| rx > 100_000);
    let summary = stop(running);
    assert!(summary.ports.iter().all(|port| port.rx.iter().all(|queue| queue.packets > 0)));
    assert_eq!(summary.rx().packets, summary.tx().packets);
    assert!(
        summary.workers.iter().all(|worker| worker.handed_over == 0),
        "each worker has a transmit queue of each port"
    );
}

/// A port that sends into a FIFO which nobody empties: what it drops when it stops is in the summary.
#[test]
fn the_summary_has_what_ports_drop_while_they_stop() {
    let folder = std::env::temp_dir().join(format!("wirepath-summary-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("fifo.pcap");
    let _ = std::fs::remove_file(&path);
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::NONBLOCK;
    let reader = std::fs::File::from(rustix::fs::open(&path, flags, rustix::fs::Mode::empty()).unwrap());
    let text = format!(
        "[[port]]\nname = 'a'\ndriver = 'null'\n[port.null]\nsource = 'udp4'\n\
         [[port]]\nname = 'b'\ndriver = 'pcap'\n[port.pcap]\nwrite = '{}'\n",
        path.display()
    );
    let mut running = open(&text).unwrap().start(|_| cross).unwrap();
    let begin = Instant::now();
    while running.snapshot().ports[1].2[0].drops.is_empty() {
        assert!(begin.elapsed() < TIMEOUT, "the FIFO is full");
        running.tick(&mut ());
        std::thread::sleep(Duration::from_millis(1));
    }
    let summary = stop(running);
    let mut content = Vec::new();
    std::io::Read::read_to_end(&mut &reader, &mut content).unwrap();
    let _ = std::fs::remove_dir_all(&folder);
    // The file has a header of 24 bytes; each record has one of 16.
    let mut records = 0;
    let mut at = 24;
    while let Some(length) = content.get(at + 8..at + 12) {
        at += 16 + u32::from_le_bytes(length.try_into().unwrap()) as usize;
        records += u64::from(at <= content.len());
    }
    let sent = &summary.ports[1].tx[0];
    assert!(records > 0 && sent.packets == records, "{records} records, {sent:?}");
    assert!(sent.drops.iter().any(|(reason, n)| *reason == DropReason::Stopping && *n > 0), "{sent:?}");
    assert_eq!(summary.balance().in_flight(), 0, "{:?}", summary.balance());
}
