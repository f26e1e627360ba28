use openai_protocol::worker::{HealthCheckConfig, WorkerStatus};

use super::*;
use crate::worker::{BasicWorkerBuilder, WorkerType};

const URLS: [&str; 4] = [
    "http://w0:8000",
    "http://w1:8000",
    "http://w2:8000",
    "http://w3:8000",
];

fn create_workers(urls: &[&str]) -> Vec<Arc<dyn Worker>> {
    urls.iter()
        .map(|url| {
            Arc::new(
                BasicWorkerBuilder::new(*url)
                    .worker_type(WorkerType::Regular)
                    .health_config(HealthCheckConfig {
                        disable_health_check: true,
                        ..Default::default()
                    })
                    .build(),
            ) as Arc<dyn Worker>
        })
        .collect()
}

fn set_load(worker: &Arc<dyn Worker>, load: usize) {
    while worker.load() < load {
        worker.increment_load();
    }
}

fn policy(load_factor: f64, balance_abs_threshold: usize) -> BoundedConsistentHashingPolicy {
    BoundedConsistentHashingPolicy::new(BoundedConsistentHashingConfig {
        load_factor,
        balance_abs_threshold,
    })
}

/// Selects for `key`, counts the request on its worker, returns the branch.
fn place(
    policy: &BoundedConsistentHashingPolicy,
    workers: &[Arc<dyn Worker>],
    key: &str,
) -> (usize, Branch) {
    let info = SelectWorkerInfo {
        routing_key: Some(key),
        hash_ring: Some(Arc::new(HashRing::new(workers.iter().map(|w| w.url())))),
        ..Default::default()
    };
    let (index, branch) = policy.select_worker_impl(workers, &info);
    let index = index.expect("a worker is healthy");
    workers[index].increment_load();
    (index, branch)
}

/// The workers in ring order from `key`'s home, as indices.
fn ring_order(workers: &[Arc<dyn Worker>], key: &str) -> Vec<usize> {
    let ring = HashRing::new(workers.iter().map(|w| w.url()));
    let mut order: Vec<usize> = Vec::new();
    while order.len() < workers.len() {
        let url = ring
            .find_healthy_url(key, |url| !order.iter().any(|&i| workers[i].url() == url))
            .expect("a worker is left");
        order.extend(workers.iter().position(|w| w.url() == url));
    }
    order
}

#[test]
fn twenty_open_requests_of_one_home_on_two_workers_end_as_13_and_7() {
    let workers = create_workers(&URLS[..2]);
    let policy = policy(1.25, 0);
    for _ in 0..20 {
        place(&policy, &workers, "one-key");
    }
    let home = ring_order(&workers, "one-key")[0];
    assert_eq!(workers[home].load(), 13);
    assert_eq!(workers[1 - home].load(), 7);
}

#[test]
fn a_spill_goes_to_the_ring_successor_and_not_to_the_least_loaded() {
    let workers = create_workers(&URLS);
    let order = ring_order(&workers, "some-key");
    set_load(&workers[order[0]], 10);
    set_load(&workers[order[1]], 2);
    let (index, branch) = place(&policy(1.25, 0), &workers, "some-key");
    assert_eq!((index, branch), (order[1], Branch::Spill));
}

#[test]
fn a_gap_keeps_the_second_request_of_a_home() {
    for (gap, stays) in [(0, false), (2, true)] {
        let workers = create_workers(&URLS);
        let policy = policy(1.25, gap);
        let (first, branch) = place(&policy, &workers, "a-key");
        assert_eq!(branch, Branch::Home);
        let (second, _) = place(&policy, &workers, "a-key");
        assert_eq!(second == first, stays, "gap {gap}");
    }
}

#[test]
fn unavailable_workers_count_neither_as_home_nor_in_the_mean() {
    let workers = create_workers(&URLS);
    let order = ring_order(&workers, "k");
    workers[order[0]].set_status(WorkerStatus::NotReady);
    set_load(&workers[order[0]], 100);
    let (index, branch) = place(&policy(1.25, 0), &workers, "k");
    assert_eq!((index, branch), (order[1], Branch::Home));
    set_load(&workers[order[1]], 3);
    let (index, branch) = place(&policy(1.25, 0), &workers, "k");
    assert_eq!((index, branch), (order[2], Branch::Spill));
}

#[test]
fn without_a_key_the_least_loaded_serve_in_turn() {
    let workers = create_workers(&URLS);
    set_load(&workers[0], 1);
    let policy = BoundedConsistentHashingPolicy::with_defaults();
    let info = SelectWorkerInfo::default();
    let picks: Vec<_> = (0..6)
        .map(|_| policy.select_worker_impl(&workers, &info))
        .collect();
    let expected = [2, 3, 1, 2, 3, 1].map(|index| (Some(index), Branch::Unlabelled));
    assert_eq!(picks, expected);
}

#[test]
fn nobody_healthy_gives_nobody() {
    let workers = create_workers(&URLS[..1]);
    workers[0].set_status(WorkerStatus::NotReady);
    let info = SelectWorkerInfo {
        routing_key: Some("k"),
        ..Default::default()
    };
    let (index, branch) =
        BoundedConsistentHashingPolicy::with_defaults().select_worker_impl(&workers, &info);
    assert_eq!((index, branch), (None, Branch::NoHealthyWorkers));
}

#[test]
fn a_ring_made_on_the_spot_gives_the_same_home() {
    let workers = create_workers(&URLS);
    let policy = BoundedConsistentHashingPolicy::with_defaults();
    for number in 0..50 {
        let key = format!("key-{number}");
        let info = SelectWorkerInfo {
            routing_key: Some(&key),
            ..Default::default()
        };
        let (index, _) = policy.select_worker_impl(&workers, &info);
        assert_eq!(index, Some(ring_order(&workers, &key)[0]));
    }
}

/// One case of the vectors shared with the Python gateway: workers that are
/// out have no load.
struct Case {
    label: String,
    loads: Vec<Option<usize>>,
    load_factor: f64,
    gap: usize,
    pick: usize,
    branch: &'static str,
}

fn branch_name(name: &str) -> &'static str {
    match name {
        "home" => "home",
        "spill" => "spill",
        other => panic!("vectors hold a branch {other:?}"),
    }
}

/// Reads the lines `label factor gap pick branch load,load,-,load`.
fn cases(text: &str) -> Vec<Case> {
    text.lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| {
            let words: Vec<&str> = line.split(' ').collect();
            Case {
                label: words[0].to_string(),
                load_factor: words[1].parse().expect("a factor"),
                gap: words[2].parse().expect("a gap"),
                pick: words[3].parse().expect("an index"),
                branch: branch_name(words[4]),
                loads: words[5].split(',').map(|load| load.parse().ok()).collect(),
            }
        })
        .collect()
}

#[test]
fn picks_are_those_of_the_shared_vectors() {
    let cases = cases(include_str!("vectors.txt"));
    assert_eq!(cases.len(), 1000);
    for case in cases {
        let urls: Vec<String> = (0..case.loads.len())
            .map(|number| format!("http://worker-{number}:30000"))
            .collect();
        let workers = create_workers(&urls.iter().map(String::as_str).collect::<Vec<_>>());
        for (worker, load) in workers.iter().zip(&case.loads) {
            match load {
                Some(load) => set_load(worker, *load),
                None => worker.set_status(WorkerStatus::NotReady),
            }
        }
        let policy = policy(case.load_factor, case.gap);
        let (index, branch) = place(&policy, &workers, &case.label);
        assert_eq!(
            (index, branch.as_str()),
            (case.pick, case.branch),
            "{}",
            case.label
        );
    }
}
