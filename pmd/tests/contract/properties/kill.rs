use std::time::{Duration, Instant};
use wirepath_packet::PortId;

use wirepath_packet::{Batch, Pool};
use wirepath_pmd::port::OpenPort;
use wirepath_testlab::{eventually, spawn};

use crate::bench::{Bench, PORT, TIMEOUT, frame, frames, identify};
use crate::common::{bytes, packet, settings};

const TABLE: &str = "WIREPATH_CONTRACT_PORT";
/// Flow of the frames that the child returns.
const ECHO: u32 = 0x1000;

/// A process with the port is killed. The next one can use the port normally.
pub(crate) fn leaves_nothing_in_the_way(bench: &mut Bench) {
    let program = std::env::current_exe().expect("a path of this program");
    for round in 0..2 {
        let table = format!("{TABLE}={}", bench.wire.port(&[]));
        let mut child =
            spawn(&["env", &table, program.to_str().expect("a plain path"), "--exact", "child", "--nocapture"]);
        let mut number = 0;
        let echoed = eventually(TIMEOUT * 2, || {
            assert!(child.running(), "the child has ended");
            number += 1;
            bench.wire.offer(&frame(0, number, 100));
            bench.wire.arrived().iter().any(|frame| identify(frame).is_some_and(|(flow, _)| flow == ECHO))
        });
        // Kill it under traffic.
        for more in 0..50 {
            bench.wire.offer(&frame(0, number + more, 100));
        }
        let outcome = child.kill();
        assert!(echoed, "round {round}: the child sent nothing back:\n{}{}", outcome.stdout, outcome.stderr);
        assert_eq!(outcome.code, None, "killed by a signal");
    }
    std::thread::sleep(Duration::from_millis(50));
    let _ = bench.wire.arrived();
    bench.start(&[]);
    let _ = bench.poll();
    bench.assert_exchanges(&frames(5000..5300));
}

/// Returns received frames as flow [`ECHO`] until the process is killed.
pub(crate) fn child() {
    let Ok(table) = std::env::var(TABLE) else { return };
    let settings = settings(&table);
    let pool = Pool::new("child", 4096).expect("memory for a pool");
    let config = settings.config(PortId::new(PORT), pool.clone());
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
