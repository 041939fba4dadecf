use std::time::{Duration, Instant};

use wirepath_pmd::packet::{Batch, Pool};
use wirepath_pmd::port::OpenPort;
use wirepath_testlab::{eventually, spawn};

use crate::bench::{Bench, PATIENCE, PORT, bytes, frame, frames, identify, packet, plan};

const TABLE: &str = "WIREPATH_CONTRACT_PORT";
/// Flow of the frames that the child sends back.
const ECHO: u32 = 0x1000;

/// A program that has the port is killed; the next one has it as if nothing had been.
pub(crate) fn leaves_nothing_in_the_way(bench: &mut Bench) {
    let program = std::env::current_exe().expect("a path of this program");
    for round in 0..2 {
        let table = format!("{TABLE}={}", bench.rig.port(&[]));
        let mut child =
            spawn(&["env", &table, program.to_str().expect("a plain path"), "--exact", "child", "--nocapture"]);
        let mut number = 0;
        let echoed = eventually(PATIENCE * 2, || {
            assert!(child.running(), "the child has ended");
            number += 1;
            bench.rig.offer(&frame(0, number, 100));
            bench.rig.arrived().iter().any(|frame| identify(frame).is_some_and(|(flow, _)| flow == ECHO))
        });
        // Killed in the middle of traffic.
        for more in 0..50 {
            bench.rig.offer(&frame(0, number + more, 100));
        }
        let outcome = child.kill();
        assert!(echoed, "round {round}: the child sent nothing back:\n{}{}", outcome.stdout, outcome.stderr);
        assert_eq!(outcome.code, None, "killed by a signal");
    }
    std::thread::sleep(Duration::from_millis(50));
    let _ = bench.rig.arrived();
    bench.start(&[]);
    let _ = bench.poll();
    bench.assert_exchanges(&frames(5000..5300));
}

/// Sends back what it receives, as flow [`ECHO`], until it is killed.
pub(crate) fn child() {
    let Ok(table) = std::env::var(TABLE) else { return };
    let settings = plan(&table);
    let pool = Pool::new("child", 4096).expect("memory for a pool");
    let config = settings.config(PORT, pool.clone());
    let open = OpenPort::open("dut", settings.plan).unwrap_or_else(|error| panic!("open: {error}"));
    let configured = open.configure(config).unwrap_or_else(|error| panic!("configure: {error}"));
    let mut it = configured.start().unwrap_or_else(|error| panic!("start: {error}"));
    let end = Instant::now() + Duration::from_secs(60);
    while Instant::now() < end {
        let mut batch = Batch::new();
        it.rx[0].receive(&mut batch);
        let mut back: Batch = batch
            .iter()
            .filter_map(|received| identify(&bytes(received)))
            .map(|(_, number)| packet(&pool, &frame(ECHO, number, 100)))
            .collect();
        it.tx[0].transmit(&mut back);
        it.tx[0].reclaim();
    }
}
