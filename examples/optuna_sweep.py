#!/usr/bin/env python3
"""Drives a Capstan sweep from Optuna: Optuna asks for trials and Capstan checks and trains them;
the results are reported to Optuna.

    pip install optuna
    capstan sweep plan quickstart dataset=mock optimizer.min_lr=1e-6 train.train_iters=30 \\
        optimizer.lr=1e-3,1e-2 --out sweeps/search
    examples/optuna_sweep.py sweeps/search --trials 10

The sweep's directory keeps every trial with its recipe:
`capstan sweep table` and `plot` work as for any sweep.
"""

import argparse
import json
import subprocess

import optuna


class Conversation:
    """One `capstan sweep COMMAND DIR -`: one JSON object per line in both directions."""

    def __init__(self, capstan, command, directory):
        self.process = subprocess.Popen(
            [capstan, "sweep", command, directory, "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True
        )

    def say(self, request):
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


def main():
    parser = argparse.ArgumentParser(description="search learning rate and weight decay with Optuna")
    parser.add_argument("directory", help="of a sweep that `capstan sweep plan` has made")
    parser.add_argument("--capstan", default="capstan")
    parser.add_argument("--trials", type=int, default=10)
    arguments = parser.parse_args()

    ask = Conversation(arguments.capstan, "ask", arguments.directory)
    tell = Conversation(arguments.capstan, "tell", arguments.directory)

    def objective(trial):
        values = {
            "optimizer.lr": float(f"{trial.suggest_float('lr', 1e-4, 1e-1, log=True):.4g}"),
            "optimizer.weight_decay": trial.suggest_categorical("weight_decay", [0.0, 0.1]),
        }
        made = ask.say({"values": values})
        if "error" in made:  # no such trial is possible
            print(made["error"])
            raise optuna.TrialPruned
        subprocess.run([arguments.capstan, *made["command"]], check=False)
        result = tell.say({"trial": made["trial"]})
        if result["value"] is None or result["state"] != "done":
            raise optuna.TrialPruned
        return result["value"]

    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=1))
    study.optimize(objective, n_trials=arguments.trials)
    print(f"best {study.best_value:.4f} with {study.best_params}")


if __name__ == "__main__":
    main()
