use wirepath_pmd::packet::Batch;
use wirepath_pmd::port::{PortEvent, StartedPort};
use wirepath_testlab::eventually;

use crate::bench::{Bench, PATIENCE, frames};

/// The device goes away under a running port: an event names it, its queues do no harm, its buffers come back, another port goes on.
pub(crate) fn says_so_and_others_go_on(bench: &mut Bench) {
    let mut other = Bench::new(bench.rig.another());
    bench.start(&[]);
    other.start(&[]);
    bench.assert_exchanges(&frames(0..100));
    other.assert_exchanges(&frames(0..100));

    let name = bench.rig.remove();
    let mut told = None;
    eventually(PATIENCE, || {
        // As a worker would: the queues are polled all the time.
        let mut batch: Batch = frames(0..4).iter().map(|frame| bench.packet(frame)).collect();
        let it = bench.started();
        it.tx[0].transmit(&mut batch);
        let mut batch = Batch::new();
        it.rx[0].receive(&mut batch);
        told = it.port.events().into_iter().find_map(|event| match event {
            PortEvent::Lost(text) => Some(text),
            PortEvent::Link(_) | PortEvent::Finished => None,
        });
        told.is_some()
    });
    let told = told.unwrap_or_else(|| panic!("nothing says that '{name}' is gone"));
    assert!(told.contains(&name), "'{name}' is not named in: {told}");
    other.assert_exchanges(&frames(200..400));

    for _ in 0..100 {
        let mut batch: Batch = frames(0..4).iter().map(|frame| bench.packet(frame)).collect();
        let it = bench.started();
        it.tx[0].transmit(&mut batch);
        batch.clear();
        it.rx[0].receive(&mut batch);
    }
    let StartedPort { port, rx, tx } = bench.port.take().expect("started");
    // Nothing is left to stop; but it may say so.
    drop(port.stop(rx, tx));
    assert_eq!(bench.pool.outstanding(), 0, "buffers that did not come back");
    other.assert_exchanges(&frames(500..600));
    other.stop();
}
