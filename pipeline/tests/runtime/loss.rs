//! Ports that lose their interface: what the program does meanwhile, and when it gives up.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use wirepath_packet::Batch;
use wirepath_packet::drops::DropReason;
use wirepath_pipeline::{Context, Idle, RunOptions, Runtime, RuntimeConfig, Summary};
use wirepath_settings::Source;
use wirepath_testlab::{FramePort, Lab, Namespace, Requirement, Veth, eventually, require};

const TIMEOUT: Duration = Duration::from_secs(20);

/// Hosts on both sides of a program with the ports `lan` and `wan`.
struct World {
    left: Namespace,
    right: Namespace,
    dut: Namespace,
    _lab: Lab,
}

impl World {
    fn new(name: &str) -> Self {
        let lab = Lab::new(name);
        let [left, dut, right] = ["left", "dut", "right"].map(|name| lab.namespace(name));
        let world = Self { left, right, dut, _lab: lab };
        world.plug("lan");
        world.plug("wan");
        world
    }

    /// Creates the interface of a port and its cable to a host.
    fn plug(&self, port: &str) {
        let host = if port == "lan" { &self.left } else { &self.right };
        Veth::new((&self.dut, port), (host, "eth0")).queues(2).plug();
    }

    /// Runs a program that forwards between the ports, until `work` has ended or the program ends by itself.
    /// Returns its summary, and whether it ended by itself.
    fn run(&self, idle: Idle, keys: &str, work: impl FnOnce() + Send) -> (Summary, bool) {
        let ports: String = ["lan", "wan"]
            .map(|name| format!("[[port]]\nname = '{name}'\ndevice = '{name}'\nqueues = 2\n{keys}\n"))
            .concat();
        let stop = Arc::new(AtomicBool::new(false));
        let options = RunOptions { stop: Some(Arc::clone(&stop)), ..RunOptions::default() };
        let (ready, started) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            let program = scope.spawn(move || {
                self.dut.inside(|| {
                    let source = Source::new("test", &ports);
                    let document = source.parse().unwrap();
                    let ports = RuntimeConfig::ports_from_settings(&document.settings()).unwrap();
                    let runtime =
                        Runtime::open(ports, RuntimeConfig { buffers: 4096, idle, ..RuntimeConfig::default() });
                    let mut running = runtime.unwrap().start(|_| cross).unwrap();
                    ready.send(()).unwrap();
                    running.run(&mut (), &options);
                    let by_itself = !options.stop.as_ref().is_some_and(|stop| stop.load(Ordering::Relaxed));
                    (running.stop(&mut ()), by_itself)
                })
            });
            started.recv().expect("the program starts");
            work();
            // A program that ends by itself does so before the stop.
            eventually(if keys.contains("exit") { TIMEOUT } else { Duration::ZERO }, || program.is_finished());
            stop.store(true, Ordering::Relaxed);
            let (summary, by_itself) = program.join().expect("the program ends");
            assert_eq!(summary.leaked_buffers, 0);
            (summary, by_itself)
        })
    }
}

fn cross(context: &mut Context<'_>, batch: &mut Batch) {
    let port = context.in_port().expect("no other worker");
    context.send_batch(port.paired(), batch);
}

fn frame(number: u8) -> Vec<u8> {
    [&[2; 6][..], &[4; 6], &[0x88, 0xb5], &[number; 46]].concat()
}

/// Sends frames until one arrives. Returns how many were sent.
fn send_until_received(from: &FramePort, to: &mut FramePort, number: u8) -> u64 {
    let mut sent = 0;
    assert!(eventually(TIMEOUT, || {
        from.send(&frame(number)).unwrap();
        sent += 1;
        to.receive_where(Duration::from_millis(20), |got| got.bytes == frame(number)).is_some()
    }));
    sent
}

#[test]
fn a_port_that_returns_forwards_again() {
    require!(all Requirement::LAB);
    let always = Idle::Sleep(u64::MAX);
    for (driver, idle) in [
        ("driver = 'af_packet'", Idle::Adaptive),
        ("driver = 'af_packet'", always),
        ("driver = 'af_xdp'", Idle::Adaptive),
        ("driver = 'af_xdp'", always),
    ] {
        let world = World::new("returns");
        let (summary, _) = world.run(idle, driver, || {
            let (mut right, left) = (world.right.frames("eth0"), world.left.frames("eth0"));
            send_until_received(&left, &mut right, 1);
            world.dut.ip("link del lan");
            // Packets for the lost port are dropped and counted until it returns.
            for _ in 0..10 {
                right.send(&frame(9)).unwrap();
            }
            std::thread::sleep(Duration::from_secs(1));
            world.plug("lan");
            let mut left = world.left.frames("eth0");
            send_until_received(&right, &mut left, 2);
            send_until_received(&left, &mut right, 3);
        });
        assert!(summary.failures.is_empty(), "{summary}");
        assert!(summary.drops()[&DropReason::DeviceLost] >= 10, "{summary}");
        let json = summary.to_json();
        assert_eq!((&json["ports"][0]["losses"], &json["ports"][0]["away"]), (&1.into(), &false.into()));
        assert_eq!(json["ports"][1]["losses"], 0);
        let turns: u64 = summary.workers.iter().map(|worker| worker.turns.0).sum();
        assert!(turns < 300_000, "{driver}: the workers do not spin: {turns} turns");
    }
}

#[test]
fn the_policy_decides_when_a_port_has_failed() {
    require!(all Requirement::LAB);
    for (keys, ends, failure) in [
        ("on_loss = 'wait'", false, None),
        ("on_loss = 'exit'", true, Some("port lan failed: interface lan was removed")),
        (
            "on_loss = 'fail-after'\nloss_timeout = 1",
            false,
            Some("port lan failed: interface lan was removed and did not return within 1 s"),
        ),
    ] {
        let world = World::new("policy");
        let (summary, by_itself) = world.run(Idle::Adaptive, &format!("driver = 'af_packet'\n{keys}"), || {
            let (mut right, left) = (world.right.frames("eth0"), world.left.frames("eth0"));
            send_until_received(&left, &mut right, 1);
            world.dut.ip("link del lan");
            std::thread::sleep(Duration::from_secs(if keys.contains("fail-after") { 3 } else { 1 }));
        });
        assert_eq!(by_itself, ends, "{keys}");
        assert_eq!(summary.failures, failure.map(str::to_owned).into_iter().collect::<Vec<_>>(), "{keys}");
        let lan = &summary.ports[0];
        assert_eq!((lan.losses, lan.away), (1, true), "{keys}");
    }
}
