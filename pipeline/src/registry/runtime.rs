//! The tables of the runtime.

use serde_json::Value;
use wirepath_packet::Pool;
use wirepath_packet::counters::QueueStats;
use wirepath_packet::drops::DropReason;

use super::{Column, Page, Row, TableSpec, Unit};
use crate::ControlPlane;
use crate::context::WorkerCounters;
use crate::counter::{CounterId, CounterValues, METRICS_TABLE};
use crate::mailbox::Mailbox;
use crate::runtime::total;

/// The tables of the runtime, which every program has.
pub const TABLES: &[&TableSpec] = &[&PORTS, &QUEUES, &WORKERS, &DROPS, &COUNTERS, &WORKER_COUNTERS, &BALANCE, &MEMORY];

static PORTS: TableSpec = TableSpec {
    name: "ports",
    about: "Ports with their devices, states and totals",
    metric: Some("port"),
    columns: &[
        Column::key("port", "Name of the port"),
        Column::attribute("driver", "Driver"),
        Column::attribute("device", "Device that the driver opened"),
        Column::attribute("mode", "Operating mode of the driver"),
        Column::attribute(
            "state",
            "up, down: link of the device; away: the port waits for its device; failed: the port stays unused",
        ),
        Column::attribute("mac", "Ethernet address"),
        Column::gauge("mtu", Unit::Bytes, "Largest layer-3 packet"),
        Column::gauge("speed", Unit::None, "Speed of the link in Mbit/s"),
        Column::counter("rx_packets", Unit::Packets, "Packets delivered to the program"),
        Column::counter("rx_bytes", Unit::Bytes, "Bytes of those packets, without the frame check sequence"),
        Column::counter("tx_packets", Unit::Packets, "Packets that the device accepted"),
        Column::counter("tx_bytes", Unit::Bytes, "Bytes of those packets, without the frame check sequence"),
        Column::counter("rx_drops", Unit::Packets, "Packets dropped by the receive queues"),
        Column::counter("tx_drops", Unit::Packets, "Packets dropped by the transmit queues"),
        Column::counter(
            "device_drops",
            Unit::Packets,
            "Packets that the device or the kernel dropped before a receive queue saw them",
        ),
        Column::counter("losses", Unit::None, "Number of times that the port lost its device"),
    ],
};

static QUEUES: TableSpec = TableSpec {
    name: "queues",
    about: "Receive and transmit queues",
    metric: Some("queue"),
    columns: &[
        Column::key("port", "Name of the port"),
        Column::key("direction", "rx or tx"),
        Column::key("queue", "Index of the queue"),
        Column::counter("packets", Unit::Packets, "Packets delivered to the program, or accepted by the device"),
        Column::counter("bytes", Unit::Bytes, "Bytes of those packets, without the frame check sequence"),
        Column::counter("bursts", Unit::None, "Bursts of at least one packet"),
        Column::counter("empty", Unit::None, "Polls, or attempts to send, without a packet"),
        Column::counter("drops", Unit::Packets, "Dropped packets"),
        Column::gauge(
            "waiting",
            Unit::Packets,
            "Packets that waited in the receive queue, or that the device had not sent, when the worker last looked",
        ),
        Column::counter("completed_checksums", Unit::Packets, "Checksums that the driver completed in software"),
        Column::counter("segmented", Unit::Packets, "Superframes that the driver or the port segmented"),
        Column::counter("joined", Unit::Packets, "Received packets that became part of a superframe"),
        Column::counter("copied", Unit::Packets, "Packets copied into or out of the pool"),
    ],
};

static WORKERS: TableSpec = TableSpec {
    name: "workers",
    about: "Worker threads",
    metric: Some("worker"),
    columns: &[
        Column::key("worker", "Index of the worker"),
        Column::attribute("core", "Core to which the worker is pinned"),
        Column::attribute("queues", "Receive queues that the worker polls"),
        Column::attribute("measuring", "true while a measurement runs (wirepath perf)"),
        Column::counter("turns", Unit::None, "Iterations over the queues"),
        Column::counter("idle_turns", Unit::None, "Iterations that found no packets"),
        Column::counter("packets", Unit::Packets, "Packets from the receive queues and from other threads"),
        Column::counter(
            "busy_cycles",
            Unit::Cycles,
            "Cycles of iterations that found packets; idle ones among them count with their usual cycles",
        ),
        Column::counter("idle_cycles", Unit::Cycles, "Cycles of iterations that found none"),
        Column::counter("sleep_cycles", Unit::Cycles, "Cycles during sleep"),
        Column::counter("sleeps", Unit::None, "Number of times that the worker slept"),
        Column::counter("handed_over", Unit::Packets, "Packets handed over to other workers"),
        Column::counter("punted", Unit::Packets, "Packets passed to the control thread"),
        Column::counter("learned", Unit::None, "Addresses reported to the control thread"),
        Column::counter("learns_lost", Unit::None, "Reports of addresses that found a full queue"),
        Column::counter("to_kernel", Unit::Packets, "Packets that a rule passed to the kernel"),
        Column::counter("copies", Unit::Packets, "Copies of packets by replication and mirroring"),
        Column::counter("generated", Unit::Packets, "Packets that stages made themselves"),
        Column::counter("drops", Unit::Packets, "Packets dropped by stages"),
    ],
};

static DROPS: TableSpec = TableSpec {
    name: "drops",
    about: "Dropped packets by place and reason",
    metric: Some("drop"),
    columns: &[
        Column::key("place", "device, rx or tx: queues of a port; worker; control: the control thread"),
        Column::key("name", "Name of the port, or index of the worker"),
        Column::key("queue", "Index of the queue"),
        Column::key("reason", "Name of the reason"),
        Column::counter("packets", Unit::Packets, "Dropped packets"),
        Column::attribute("text", "Description of the reason"),
    ],
};

static COUNTERS: TableSpec = TableSpec {
    name: "counters",
    about: "Counters of the application",
    // Each counter has a family of its own, with the value of each worker.
    metric: None,
    columns: &[
        Column::key("counter", "Name of the counter"),
        Column::counter("value", Unit::None, "Sum over the workers and the control thread"),
        Column::attribute("unit", "Unit of the value; empty for a count"),
        Column::attribute("text", "Description of the counter"),
    ],
};

static WORKER_COUNTERS: TableSpec = TableSpec {
    name: "worker_counters",
    about: "Counters of the application by worker",
    metric: None,
    columns: &[
        Column::key("counter", "Name of the counter"),
        Column::key("worker", "Index of the worker, or control: the control thread"),
        Column::counter("value", Unit::None, "Value of the counter there"),
        Column::attribute("unit", "Unit of the value; empty for a count"),
    ],
};

static BALANCE: TableSpec = TableSpec {
    name: "balance",
    about: "Origins and destinations of all packets",
    metric: Some("packets"),
    columns: &[
        Column::counter("received", Unit::Packets, "Packets that receive queues delivered"),
        Column::counter("copies", Unit::Packets, "Copies made by replication and mirroring"),
        Column::counter("generated", Unit::Packets, "Packets that the program made itself"),
        Column::counter("sent", Unit::Packets, "Packets that transmit queues accepted"),
        Column::counter("dropped", Unit::Packets, "Packets dropped after their reception"),
        Column::counter("to_kernel", Unit::Packets, "Packets passed to the kernel"),
        Column::counter("consumed", Unit::Packets, "Packets that the control thread processed"),
        Column::counter("joined", Unit::Packets, "Packets that became part of a superframe, and fragments of others"),
        Column::gauge("in_flight", Unit::Packets, "Packets without a destination yet; approximate under load"),
    ],
};

static MEMORY: TableSpec = TableSpec {
    name: "memory",
    about: "Pools of packet buffers",
    metric: Some("pool"),
    columns: &[
        Column::key("pool", "Name of the pool"),
        Column::attribute("pages", "Kind of memory that backs the pool"),
        Column::gauge("buffers", Unit::None, "Buffers of the pool"),
        Column::gauge("available", Unit::None, "Buffers in the shared free list; threads cache some more"),
        Column::gauge("outstanding", Unit::None, "Buffers in packets, posted to devices, or cached by threads"),
        Column::gauge("size", Unit::Bytes, "Memory of the buffers"),
    ],
};

/// Appends rows of one of [`TABLES`].
pub(super) fn list(plane: &mut ControlPlane, table: &TableSpec, page: &mut Page<'_>) {
    match table.name {
        "ports" => {
            let ports = (page.cursor()..).zip(page.cursor() as usize..plane.devices.len());
            page.extend_from(ports, |port| port_row(plane, port));
        }
        "queues" => {
            let queues = queues(plane);
            page.extend(queues, |(port, direction, index, stats)| queue_row(port, direction, index, &stats));
        }
        "workers" => page.extend(0..plane.workers.len(), |worker| worker_row(plane, worker)),
        "drops" => page.extend(drops(plane), |row| row),
        "counters" => page.extend(CounterId::all(), |id| {
            vec![id.name().into(), plane.counter(id).into(), id.unit().name().into(), id.about().into()]
        }),
        "worker_counters" => {
            let entries = CounterId::all().flat_map(|id| values(plane).map(move |place| (id, place)));
            page.extend(entries, |(id, (worker, values))| {
                vec![id.name().into(), worker, values.get(id).into(), id.unit().name().into()]
            });
        }
        METRICS_TABLE => page.extend(values(plane), |(worker, values)| {
            // Counters that were registered since then have no column.
            let counters = values.all().map(|(_, n)| n.into()).take(table.columns.len() - 1);
            std::iter::once(worker).chain(counters).collect()
        }),
        "balance" => page.extend([()], |()| {
            let balance = plane.summary().balance();
            vec![
                balance.received.into(),
                balance.copies.into(),
                balance.generated.into(),
                balance.sent.into(),
                balance.dropped.into(),
                balance.to_kernel.into(),
                balance.consumed.into(),
                balance.joined.into(),
                balance.in_flight().into(),
            ]
        }),
        "memory" => {
            let mut pools: Vec<&Pool> = Vec::new();
            for port in &plane.ports {
                if !port.is_removed && pools.iter().all(|pool| pool.id() != port.pool.id()) {
                    pools.push(&port.pool);
                }
            }
            page.extend(pools, pool_row);
        }
        _ => {}
    }
}

fn port_row(plane: &mut ControlPlane, index: usize) -> Option<Row> {
    let state = plane.port_state(index);
    let port = plane.devices.get_mut(index)?.as_mut()?;
    let capabilities = port.capabilities();
    let link = port.link();
    let (rx, tx) = (total(&port.rx_statistics()), total(&port.tx_statistics()));
    let device_drops: u64 = port.device_drops().iter().map(|(_, n)| n).sum();
    let info = &plane.ports[index];
    let mac = info.mac.map(|mac| mac.to_string());
    Some(vec![
        info.name.clone().into(),
        capabilities.driver.into(),
        capabilities.device.into(),
        capabilities.mode.into(),
        state.unwrap_or(if link.state == wirepath_pmd::port::LinkState::Up { "up" } else { "down" }).into(),
        mac.into(),
        info.mtu.into(),
        link.speed.into(),
        rx.packets.into(),
        rx.bytes.into(),
        tx.packets.into(),
        tx.bytes.into(),
        rx.dropped().into(),
        tx.dropped().into(),
        (device_drops + plane.rule_drops[index]).into(),
        plane.losses[index].into(),
    ])
}

/// Iterates over the queues of all ports: name of the port, direction, index and counters.
fn queues(plane: &ControlPlane) -> impl Iterator<Item = (&str, &'static str, usize, QueueStats)> {
    plane.devices.iter().flatten().flat_map(|port| {
        let rx = port.rx_statistics().into_iter().enumerate().map(|(i, stats)| ("rx", i, stats));
        let tx = port.tx_statistics().into_iter().enumerate().map(|(i, stats)| ("tx", i, stats));
        rx.chain(tx).map(|(direction, index, stats)| (port.name(), direction, index, stats))
    })
}

fn queue_row(port: &str, direction: &str, index: usize, stats: &QueueStats) -> Row {
    vec![
        port.into(),
        direction.into(),
        index.into(),
        stats.packets.into(),
        stats.bytes.into(),
        stats.bursts.into(),
        stats.empty.into(),
        stats.dropped().into(),
        stats.waiting.into(),
        stats.completed_checksums.into(),
        stats.segmented.into(),
        stats.joined.into(),
        stats.copied.into(),
    ]
}

fn worker_row(plane: &ControlPlane, index: usize) -> Row {
    let (info, counters): &(_, std::sync::Arc<WorkerCounters>) = &plane.workers[index];
    let name = |port: usize| plane.ports.get(port).map_or("?", |port| &port.name);
    let queues = info.rx_queues.iter().map(|(port, queue)| format!("{}/{queue}", name(port.index())));
    vec![
        info.index.into(),
        info.core.into(),
        queues.collect::<Vec<_>>().join(" ").into(),
        plane.mailboxes.get(index).is_some_and(Mailbox::is_recording).into(),
        counters.turns.get().into(),
        counters.idle_turns.get().into(),
        counters.packets.get().into(),
        counters.busy_cycles.get().into(),
        counters.idle_cycles.get().into(),
        counters.sleep_cycles.get().into(),
        counters.sleeps.get().into(),
        counters.handed_over.get().into(),
        counters.punted.get().into(),
        counters.learned.get().into(),
        counters.learns_lost.get().into(),
        counters.to_kernel.get().into(),
        counters.copies.get().into(),
        counters.generated.get().into(),
        counters.drops.total().into(),
    ]
}

/// Returns the rows of all drops. Their sum by reason is [`crate::Summary::drops`].
fn drops(plane: &mut ControlPlane) -> Vec<Row> {
    let row = |place: &str, name: Value, queue: Value, (reason, n): (DropReason, u64)| -> Row {
        vec![place.into(), name, queue, reason.name().into(), n.into(), reason.text().into()]
    };
    let mut rows = Vec::new();
    for removed in plane.removed_ports() {
        let name: Value = removed.name.into();
        rows.extend(removed.device_drops.into_iter().map(|drops| row("device", name.clone(), Value::Null, drops)));
        for (place, queues) in [("rx", removed.rx), ("tx", removed.tx)] {
            let drops = queues.into_iter().flat_map(|queue| queue.drops);
            rows.extend(drops.map(|drops| row(place, name.clone(), Value::Null, drops)));
        }
    }
    let devices = plane.devices.iter_mut().zip(&plane.rule_drops);
    for (port, rule_drops) in devices.filter_map(|(port, drops)| Some((port.as_mut()?, drops))) {
        let rules = (*rule_drops > 0).then_some((DropReason::RuleDrop, *rule_drops));
        for drops in port.device_drops().into_iter().chain(rules).filter(|(_, n)| *n > 0) {
            rows.push(row("device", port.name().into(), Value::Null, drops));
        }
    }
    for (port, direction, index, stats) in queues(plane) {
        rows.extend(stats.drops.into_iter().map(|drops| row(direction, port.into(), index.into(), drops)));
    }
    for (info, counters) in &plane.workers {
        rows.extend(counters.drops.nonzero().map(|drops| row("worker", info.index.into(), Value::Null, drops)));
    }
    rows.extend(plane.drops.nonzero().map(|drops| row("control", Value::Null, Value::Null, drops)));
    rows
}

/// Iterates over the threads that count: the workers, then the control thread, with the values of each.
fn values(plane: &ControlPlane) -> impl Iterator<Item = (Value, &CounterValues)> {
    let workers = plane.workers.iter().map(|(info, counters)| (info.index.into(), &counters.application));
    workers.chain([("control".into(), &plane.application)])
}

fn pool_row(pool: &Pool) -> Row {
    vec![
        pool.name().into(),
        pool.backing().to_string().into(),
        pool.capacity().into(),
        pool.available().into(),
        pool.outstanding().into(),
        (u64::from(pool.capacity()) * wirepath_packet::STRIDE as u64).into(),
    ]
}
