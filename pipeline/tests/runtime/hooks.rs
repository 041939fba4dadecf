//! Timers and idle calls of stages, and jobs of the control thread on workers.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use wirepath_packet::drops::DropReason;
use wirepath_packet::{Batch, Pool, PortId};
use wirepath_pipeline::epoch::Domain;
use wirepath_pipeline::{Context, Control, ControlPlane, CounterId, JobError, PortInfo, Stage, SteppedRuntime};

use super::programs::{cables, cross, frame, number, open, stop, wait_until};

const A: PortId = PortId::new(0);
const B: PortId = PortId::new(1);
const MS: u64 = 1_000_000;

/// Calls of timers: the number of the stage, and the time in milliseconds.
type Calls = Arc<Mutex<Vec<(u64, u64)>>>;

/// Sends a frame with its number at each call of its timer.
struct Beat {
    number: u64,
    interval: Option<Duration>,
    calls: Calls,
    idle: Arc<AtomicU64>,
    pool: Pool,
}

impl Stage for Beat {
    fn process(&mut self, _: &mut Context<'_>, _: &mut Batch) {}

    fn timer_interval(&self) -> Option<Duration> {
        self.interval
    }

    fn timer(&mut self, context: &mut Context<'_>) {
        assert_eq!(context.in_port(), None);
        self.calls.lock().unwrap().push((self.number, context.now() / MS));
        let mut packet = self.pool.take().unwrap();
        assert!(packet.extend_from_slice(&frame(self.number), &self.pool));
        context.count_generated();
        context.send(A, packet);
    }

    fn idle(&mut self, context: &mut Context<'_>) {
        assert_eq!(context.in_port(), None);
        self.idle.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn each_stage_of_a_simulated_pipeline_has_its_own_timer() {
    let (calls, idle, pool) = (Calls::default(), Arc::new(AtomicU64::new(0)), Pool::new("test", 256).unwrap());
    let beat = |number, interval: Option<u64>| Beat {
        number,
        interval: interval.map(Duration::from_millis),
        calls: Arc::clone(&calls),
        idle: Arc::clone(&idle),
        pool: pool.clone(),
    };
    let (domain, port) = (Domain::new(), PortInfo::simulated(A, "a", None, 1500, &pool));
    let stages = (beat(1, Some(10)), (beat(2, None), beat(3, Some(25))), cross);
    let mut stepped = SteppedRuntime::new(vec![port], &domain, stages).unwrap();
    stepped.advance(9 * MS);
    assert_eq!((calls.lock().unwrap().len(), idle.load(Ordering::Relaxed)), (0, 3), "three stages were idle once");
    stepped.advance(16 * MS);
    stepped.advance(25 * MS);
    let expected = [(1, 10), (1, 20), (3, 25), (1, 30), (1, 40), (1, 50), (3, 50)];
    assert_eq!(*calls.lock().unwrap(), expected);
    assert_eq!(idle.load(Ordering::Relaxed), 9);
    let sent: Vec<u64> = std::iter::from_fn(|| stepped.next_sent()).map(|packet| number(&packet)).collect();
    assert_eq!(sent, expected.map(|(number, _)| number));
    assert_eq!((stepped.balance().generated, stepped.balance().in_flight()), (7, 0));
}

#[test]
fn a_timer_wakes_its_worker_and_its_packets_leave() {
    let longest_sleep = Duration::from_millis(250);
    let modes = [
        ("busy", "idle = 'busy'"),
        ("adaptive", "idle = 'adaptive'"),
        ("sleep", "idle = 'sleep'\nsleep_below = 4294967295"),
    ];
    for (name, keys) in modes {
        let pool = Pool::new("test", 2048).unwrap();
        let port = format!("[[port]]\nname = 'a'\ndriver = 'memory'\ndevice = 'timer-{name}'\n");
        let text = format!("test_workers = 1\n[workers]\n{keys}\n{port}");
        let runtime = open(&text).unwrap();
        let config = wirepath_pmd::port::PortConfig::new(PortId::new(9), pool.clone());
        let mut far =
            wirepath_pmd::drivers::r#virtual::memory::Endpoint::named(&format!("timer-{name}"), &config).unwrap();
        let (calls, idle) = (Calls::default(), Arc::new(AtomicU64::new(0)));
        let (of_stage, idle_of_stage, own) = (Arc::clone(&calls), Arc::clone(&idle), pool.clone());
        let begin = Instant::now();
        let running = runtime
            .start(move |_| {
                let (calls, idle, pool) = (Arc::clone(&of_stage), Arc::clone(&idle_of_stage), own.clone());
                (Beat { number: 7, interval: Some(Duration::from_millis(2)), calls, idle, pool }, cross)
            })
            .unwrap();
        let mut received = 0;
        wait_until(|| {
            received += far.receive().map_or(0, |packet| u64::from(number(&packet) == 7));
            received == 50
        });
        // A worker that sleeps through its timers would take fifty sleeps.
        assert!(begin.elapsed() < longest_sleep * 20, "{name}: {:?}", begin.elapsed());
        assert!(begin.elapsed() >= Duration::from_millis(2 * 49), "{name}: no timer comes early");
        assert!(idle.load(Ordering::Relaxed) > 0, "{name}");
        let summary = stop(running);
        assert_eq!(summary.workers[0].sleeps > 10, name != "busy", "{name}: {} sleeps", summary.workers[0].sleeps);
        assert_eq!((summary.balance().in_flight(), &summary.failures[..]), (0, &[][..]), "{name}");
        assert_eq!(summary.workers[0].generated, calls.lock().unwrap().len() as u64, "{name}");
        drop(far);
        assert_eq!(pool.outstanding(), 0, "{name}");
    }
}

#[test]
fn jobs_send_drop_and_count_on_their_worker() {
    let jobs = CounterId::register("test_jobs", wirepath_pipeline::registry::Unit::None, "Jobs of the test").unwrap();
    let pool = Pool::new("test", 2048).unwrap();
    let (runtime, _a, mut b) = cables("jobs", 2, &pool);
    let mut running = runtime.start(|_| cross).unwrap();
    let plane = running.plane();
    let own = pool.clone();
    let mut sends = plane
        .run_on_worker(1, move |context| {
            for n in 0..10 {
                let mut packet = own.take().unwrap();
                assert!(packet.extend_from_slice(&frame(n), &own));
                context.count_generated();
                if n < 7 { context.send(B, packet) } else { context.drop(packet, DropReason::NoSegment) }
            }
            (context.worker(), context.in_port())
        })
        .unwrap();
    let mut all = plane.run_on_workers(move |context| {
        context.count(jobs, 1);
        context.worker() * 10
    });
    let mut outcomes = Vec::new();
    wait_until(|| {
        outcomes.extend(all.try_take());
        !outcomes.is_empty()
    });
    assert_eq!(outcomes, [[Ok(0), Ok(10)]]);
    assert_eq!(all.try_take(), None, "once");
    // The jobs of a worker run in their order.
    assert_eq!((sends.try_take(), sends.try_take()), (Some(Ok((1, None))), None));
    assert_eq!(plane.counter(jobs), 2);
    let mut received = 0;
    wait_until(|| {
        received += b.receive().map_or(0, |packet| u64::from(number(&packet) == received));
        received == 7
    });
    let refused = plane.run_on_worker(2, |_| ()).unwrap_err();
    assert_eq!((refused, refused.to_string().as_str()), (JobError::NoWorker(2), "there is no worker 2"));
    let summary = stop(running);
    assert_eq!((summary.drops()[&DropReason::NoSegment], summary.balance().in_flight()), (3, 0), "{summary}");
    drop(b);
    assert_eq!(pool.outstanding(), 0);
}

/// Counts batches; its timer runs at an interval that a job sets.
#[derive(Default)]
struct Counting {
    batches: u64,
    interval: Option<Duration>,
    timers: u64,
}

impl Stage for Counting {
    fn process(&mut self, _: &mut Context<'_>, _: &mut Batch) {
        self.batches += 1;
    }

    fn timer_interval(&self) -> Option<Duration> {
        self.interval
    }

    fn timer(&mut self, _: &mut Context<'_>) {
        self.timers += 1;
    }
}

#[test]
fn jobs_see_a_stage_of_a_tuple_and_the_context() {
    let pool = Pool::new("test", 2048).unwrap();
    let (runtime, mut a, _b) = cables("stage jobs", 2, &pool);
    let mut running = runtime.start(|_| (Counting::default(), cross)).unwrap();
    assert!(a.send_bytes(&frame(1)));
    wait_until(|| running.snapshot().ports[1].2.iter().any(|queue| queue.packets > 0));
    let take = |plane: &ControlPlane, worker| {
        let mut job = plane
            .run_on_stage(worker, |stage: &mut Counting, context| {
                stage.interval = Some(Duration::from_millis(1));
                (context.worker(), stage.batches, stage.timers)
            })
            .unwrap();
        let mut result = None;
        wait_until(|| {
            result = job.try_take();
            result.is_some()
        });
        result.unwrap().unwrap()
    };
    let plane = running.plane();
    let (first, second) = (take(plane, 0), take(plane, 1));
    assert_eq!((first.0, second.0, first.1 + second.1), (0, 1, 1));
    wait_until(|| take(plane, 1).2 > 0);

    struct Other;
    impl Stage for Other {
        fn process(&mut self, _: &mut Context<'_>, _: &mut Batch) {}
    }
    let mut job = plane.run_on_stage(1, |_: &mut Other, _| ()).unwrap();
    let mut result = None;
    wait_until(|| {
        result = job.try_take();
        result.is_some()
    });
    let error = result.unwrap().unwrap_err();
    assert!(matches!(error, JobError::NoStage { worker: 1, stage } if stage.ends_with("Other")), "{error}");
    assert_eq!(plane.run_on_stage(2, |_: &mut Counting, _| ()).unwrap_err(), JobError::NoWorker(2));
    assert_eq!(stop(running).balance().in_flight(), 0);
}

#[test]
fn a_worker_that_is_busy_or_gone_refuses_jobs() {
    let pool = Pool::new("test", 2048).unwrap();
    let (runtime, ..) = cables("refused jobs", 2, &pool);
    let mut running = runtime.start(|_| cross).unwrap();
    let plane = running.plane();
    // Worker 0 waits in a job.
    let (go, wait) = channel();
    let (begun, begins) = channel();
    let mut first = plane
        .run_on_worker(0, move |_| {
            begun.send(()).unwrap();
            wait.recv().unwrap()
        })
        .unwrap();
    begins.recv().unwrap();
    let mut waiting: Vec<_> = (0..64).map(|n| plane.run_on_worker(0, move |_| n).unwrap()).collect();
    assert_eq!(plane.run_on_worker(0, |_| ()).unwrap_err(), JobError::Full(0));
    let mut all = plane.run_on_workers(|context| context.worker());
    assert!(waiting.iter_mut().all(|job| job.try_take().is_none()) && first.try_take().is_none());
    go.send(5).unwrap();
    let mut outcomes = None;
    wait_until(|| {
        outcomes = all.try_take();
        outcomes.is_some()
    });
    assert_eq!(outcomes.unwrap(), [Err(JobError::Full(0)), Ok(1)]);
    let mut last = None;
    wait_until(|| {
        last = waiting[63].try_take();
        last.is_some()
    });
    assert_eq!((first.try_take(), last), (Some(Ok(5)), Some(Ok(63))));
    assert!(waiting[..63].iter_mut().enumerate().all(|(n, job)| job.try_take() == Some(Ok(n))));

    // A job that panics ends its worker. The job behind it has no result, and later ones are refused.
    let (go, wait) = channel::<()>();
    let mut panics = plane.run_on_worker(0, move |_| wait.recv().unwrap()).unwrap();
    let mut behind = plane.run_on_worker(0, |_| ()).unwrap();
    drop(go);
    let mut ended = None;
    wait_until(|| {
        ended = panics.try_take();
        ended.is_some()
    });
    assert_eq!(ended, Some(Err(JobError::Ended(0))));
    wait_until(|| {
        ended = behind.try_take();
        ended.is_some()
    });
    assert_eq!(ended, Some(Err(JobError::Ended(0))));
    wait_until(|| plane.run_on_worker(0, |_| ()).is_err());
    assert_eq!(plane.run_on_worker(0, |_| ()).unwrap_err().to_string(), "worker 0 has ended");
    assert_eq!(running.stop(&mut ()).failures.len(), 1);
}

/// Gives a job when the workers have stopped.
struct Late(Option<JobError>);

impl Control for Late {
    fn stop(&mut self, plane: &mut ControlPlane) {
        self.0 = plane.run_on_worker(0, |_| ()).err();
    }
}

#[test]
fn jobs_run_before_the_stop_and_not_after() {
    let pool = Pool::new("test", 2048).unwrap();
    let (runtime, ..) = cables("late jobs", 1, &pool);
    let mut running = runtime.start(|_| cross).unwrap();
    let mut jobs: Vec<_> = (0..20).map(|n| running.plane().run_on_worker(0, move |_| n).unwrap()).collect();
    let mut late = Late(None);
    running.stop(&mut late);
    assert!(jobs.iter_mut().enumerate().all(|(n, job)| job.try_take() == Some(Ok(n))));
    assert_eq!(late.0, Some(JobError::Ended(0)));
}

#[test]
fn jobs_run_in_a_simulated_pipeline() {
    let pool = Pool::new("test", 256).unwrap();
    let (domain, port) = (Domain::new(), PortInfo::simulated(A, "a", None, 1500, &pool));
    let mut stepped = SteppedRuntime::new(vec![port], &domain, cross).unwrap();
    stepped.advance(3 * MS);
    let own = pool.clone();
    let job = move |context: &mut Context<'_>| {
        let mut packet = own.take().unwrap();
        assert!(packet.extend_from_slice(&frame(3), &own));
        context.count_generated();
        context.send(A, packet);
        context.now()
    };
    let mut all = stepped.with_plane(|plane| plane.run_on_workers(job));
    assert_eq!(all.try_take(), None);
    stepped.control(&mut ());
    assert_eq!(all.try_take(), Some(vec![Ok(3 * MS)]));
    assert_eq!(stepped.next_sent().map(|packet| number(&packet)), Some(3));
    let mut one = stepped.with_plane(|plane| plane.run_on_worker(0, |context| context.now()).unwrap());
    stepped.advance(MS);
    assert_eq!(one.try_take(), Some(Ok(4 * MS)));
    assert_eq!(stepped.with_plane(|plane| plane.run_on_worker(1, |_| ()).unwrap_err()), JobError::NoWorker(1));
    assert_eq!(stepped.balance().in_flight(), 0);
}
