//! Additions of an application to the runtime: drop reasons, counters and commands of its own.

use serde_json::{Value, json};
use wirepath_packet::drops::DropReason;
use wirepath_packet::{Batch, Packet, Pool, PortId};
use wirepath_pipeline::observe::{CaptureSpec, Point};
use wirepath_pipeline::registry::{
    Argument, ArgumentKind, Command, CommandSpec, MetricsFormat, MetricsText, Registry, Row, Unit,
};
use wirepath_pipeline::{Context, Control, ControlPlane, CounterId, Running};
use wirepath_wire::Parser;

use super::programs::{cables, frame, number, stop, wait_until};

const B: PortId = PortId::new(1);

/// Returns the rows of a table.
fn rows<S>(running: &mut Running<S>, table: &str) -> Vec<Row> {
    let mut registry = Registry { control: &mut (), plane: running.plane() };
    let table = registry.table(table).unwrap();
    registry.rows(table)
}

/// Returns the text of the metrics.
fn metrics<S>(running: &mut Running<S>) -> String {
    let mut registry = Registry { control: &mut (), plane: running.plane() };
    let mut text = MetricsText::new(MetricsFormat::OpenMetrics, &mut registry, &[]);
    let mut out = String::new();
    while text.next_part(&mut registry, &mut out) {}
    out
}

#[test]
fn reasons_of_the_application_appear_like_built_in_ones() {
    let odd = DropReason::register("odd_number", "the frame has an odd number").unwrap();
    let pool = Pool::new("test", 2048).unwrap();
    let (runtime, mut a, mut b) = cables("reasons", 1, &pool);
    let spec = CaptureSpec {
        segment: None,
        rx: false,
        tx: false,
        drops: true,
        reason: Some(odd),
        port: None,
        pattern: None,
        snap: 64,
        rate: None,
    };
    let mut reader = runtime.start_capture(spec, Parser::default()).unwrap();
    let mut running = runtime
        .start(|_| {
            move |context: &mut Context<'_>, batch: &mut Batch| {
                batch.filter_map(|mut packet: Packet| match number(&packet) {
                    n if n % 2 == 1 => {
                        context.drop(packet, odd);
                        None
                    }
                    n if n % 10 == 0 => {
                        context.drop(packet, DropReason::RuleDrop);
                        None
                    }
                    _ => {
                        packet.set_out_port(B);
                        Some(packet)
                    }
                });
            }
        })
        .unwrap();
    assert!((0..100).all(|n| a.send_bytes(&frame(n))));
    let mut sent = 0;
    wait_until(|| {
        sent += usize::from(b.receive().is_some());
        sent == 40
    });
    running.plane().count_drops(odd, 3);

    let rows: Vec<Row> = rows(&mut running, "drops").into_iter().filter(|row| row[3] == "odd_number").collect();
    let row = |place: &str, packets: u64| (place.into(), packets.into(), "the frame has an odd number".into());
    let found: Vec<_> = rows.iter().map(|row| (row[0].clone(), row[4].clone(), row[5].clone())).collect();
    assert_eq!(found, [row("worker", 50), row("control", 3)]);
    let metrics = metrics(&mut running);
    let sample = "\nwirepath_drop_packets_total{place=\"worker\",name=\"0\",queue=\"\",reason=\"odd_number\"} 50\n";
    assert!(metrics.contains(sample), "{metrics}");

    let summary = stop(running);
    assert_eq!(summary.drops()[&odd], 53);
    assert_eq!(summary.drops()[&DropReason::RuleDrop], 10);
    assert!(summary.to_string().contains("  dropped 53: the frame has an odd number (odd_number)\n"), "{summary}");
    assert_eq!(summary.to_json()["drops"]["odd_number"], 53);
    let mut captured = Vec::new();
    while let Some(point) = reader.read_next(|packet| packet.point) {
        captured.push(point);
    }
    assert_eq!(captured, vec![Point::Drop(odd); 50]);
}

#[test]
fn counters_appear_summed_and_by_worker() {
    let frames = CounterId::register("test_frames", Unit::Packets, "Frames of the test").unwrap();
    let bytes = CounterId::register("test_bytes", Unit::Bytes, "Bytes of the test").unwrap();
    let unused = CounterId::register("test_unused", Unit::None, "Nothing").unwrap();
    let pool = Pool::new("test", 2048).unwrap();
    let (runtime, mut a, mut b) = cables("counters", 2, &pool);
    let mut running = runtime
        .start(|_| {
            move |context: &mut Context<'_>, batch: &mut Batch| {
                context.count(frames, batch.len() as u64);
                batch.iter().for_each(|packet| context.count(bytes, packet.len() as u64));
                context.send_batch(context.in_port().expect("nothing is handed over").paired(), batch);
            }
        })
        .unwrap();
    // Worker 0 receives from port a, worker 1 from port b.
    assert!((0..30).all(|n| a.send_bytes(&frame(n))) && (0..7).all(|n| b.send_bytes(&frame(n))));
    wait_until(|| running.plane().counter(bytes) == 37 * 64);
    running.plane().count(frames, 5);

    let rows_of = |running: &mut Running<_>, table: &str| -> Vec<Row> {
        rows(running, table).into_iter().filter(|row| row[0].as_str().unwrap().starts_with("test_")).collect()
    };
    let found = rows_of(&mut running, "counters");
    assert!(found.contains(&vec!["test_frames".into(), 42.into(), "packets".into(), "Frames of the test".into()]));
    assert!(found.contains(&vec!["test_unused".into(), 0.into(), "".into(), "Nothing".into()]));
    let found = rows_of(&mut running, "worker_counters");
    let values = |name: &str| -> Vec<_> {
        found.iter().filter(|row| row[0] == name).map(|row| (row[1].to_string(), row[2].as_u64().unwrap())).collect()
    };
    let places =
        |values: [u64; 3]| ["0", "1", "\"control\""].map(str::to_owned).into_iter().zip(values).collect::<Vec<_>>();
    assert_eq!(values("test_frames"), places([30, 7, 5]));
    assert_eq!(values("test_bytes"), places([30 * 64, 7 * 64, 0]));

    let metrics = metrics(&mut running);
    let family = "# TYPE wirepath_app_test_frames counter\n# HELP wirepath_app_test_frames Frames of the test\n\
        wirepath_app_test_frames_total{worker=\"0\"} 30\nwirepath_app_test_frames_total{worker=\"1\"} 7\n\
        wirepath_app_test_frames_total{worker=\"control\"} 5\n";
    assert!(metrics.contains(family), "{metrics}");
    assert!(metrics.contains("# UNIT wirepath_app_test_bytes bytes\n"), "{metrics}");

    let summary = stop(running);
    assert_eq!(summary.counters()[&frames], 42);
    let text = summary.to_string();
    assert!(text.contains("  counted 42 packets: Frames of the test (test_frames)\n"), "{text}");
    assert!(text.contains("  counted 2368 bytes: Bytes of the test (test_bytes)\n"), "{text}");
    assert!(summary.counters()[&unused] == 0 && !text.contains("test_unused"), "{text}");
    let json = summary.to_json();
    assert_eq!((&json["counters"]["test_frames"], &json["counters"]["test_unused"]), (&42.into(), &0.into()));
    assert_eq!(json["workers"][1]["counters"]["test_frames"], 7);
}

/// An application with a command. It counts the commands that reach it.
struct Application(u64);

/// A control that adds nothing to another one.
struct Outer(Application);

static DOUBLE: CommandSpec = CommandSpec {
    name: "double",
    about: "Doubles a number",
    arguments: &[Argument::required("number", ArgumentKind::Number, "Number to double")],
};

impl Control for Application {
    fn commands(&mut self) -> Vec<&'static CommandSpec> {
        vec![&DOUBLE]
    }

    fn command(&mut self, command: &Command<'_>, plane: &mut ControlPlane) -> Result<Value, String> {
        self.0 += 1;
        let number = command.number("number")?.unwrap_or_default();
        Ok(json!({ "double": 2 * number, "ports": plane.ports().len(), "by": command.origin }))
    }
}

impl Control for Outer {
    fn inner(&mut self) -> Option<&mut dyn Control> {
        Some(&mut self.0)
    }
}

#[test]
fn commands_reach_the_application_after_they_are_checked() {
    let pool = Pool::new("test", 256).unwrap();
    let (runtime, ..) = cables("commands", 1, &pool);
    let mut running = runtime.start(|_| |_: &mut Context<'_>, _: &mut Batch| ()).unwrap();
    let mut outer = Outer(Application(0));
    let mut registry = Registry { control: &mut outer, plane: running.plane() };
    assert_eq!(registry.commands().unwrap().iter().map(|it| it.name).collect::<Vec<_>>(), ["double"]);
    let mut give = |name: &str, arguments: Value| {
        let arguments = arguments.as_object().unwrap();
        registry.command(&Command { name, arguments, origin: "the test" })
    };
    let expected = json!({ "double": 42, "ports": 2, "by": "the test" });
    assert_eq!(give("double", json!({ "number": "21" })), Ok(expected));
    assert_eq!(give("double", json!({ "number": "x" })).unwrap_err(), "number: found \"x\", expected a number");
    let missing = "double: the argument \"number\" is missing: Number to double";
    assert_eq!(give("double", json!({})).unwrap_err(), missing);
    let unknown = "this program has no command \"dubble\"; did you mean \"double\"?";
    assert_eq!(give("dubble", json!({})).unwrap_err(), unknown);
    assert_eq!(outer.0.0, 2, "refused commands do not reach the application");
    let mut registry = Registry { control: &mut (), plane: running.plane() };
    let none = registry.command(&Command { name: "x", arguments: &Default::default(), origin: "the test" });
    assert_eq!(none.unwrap_err(), "this program has no command \"x\"");
    stop(running);
}
