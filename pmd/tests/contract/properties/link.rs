use wirepath_pmd::packet::Batch;
use wirepath_pmd::port::{LinkState, PortEvent};
use wirepath_testlab::eventually;

use crate::bench::{Bench, PATIENCE, frames};

/// The cable is pulled and plugged in again: the port says so both times, survives sending in between, and then carries on.
pub(crate) fn goes_down_and_comes_back(bench: &mut Bench) {
    bench.start(&[]);
    assert!(eventually(PATIENCE, || bench.started().port.link().state == LinkState::Up), "up at the start");
    let _ = bench.started().port.events();
    bench.assert_exchanges(&frames(0..100));

    bench.rig.set_link(false);
    wait_for(bench, LinkState::Down);
    let mut batch: Batch = frames(0..32).iter().map(|frame| bench.packet(frame)).collect();
    for _ in 0..100 {
        let it = bench.started();
        it.tx[0].transmit(&mut batch);
        it.tx[0].reclaim();
    }
    drop(batch);
    let _ = bench.poll();

    bench.rig.set_link(true);
    wait_for(bench, LinkState::Up);
    // What was taken while it was down may still come out, or be lost.
    std::thread::sleep(std::time::Duration::from_millis(100));
    bench.take_arrived();
    bench.arrived.clear();
    bench.assert_exchanges(&frames(1000..1200));
}

/// Waits for an event that tells the state, and for the state itself.
fn wait_for(bench: &mut Bench, state: LinkState) {
    let port = &mut bench.started().port;
    let told = eventually(PATIENCE, || {
        port.events().iter().any(|event| matches!(event, PortEvent::Link(link) if link.state == state))
    });
    assert!(told, "no event says that the link is {state:?}");
    assert_eq!(port.link().state, state);
}
