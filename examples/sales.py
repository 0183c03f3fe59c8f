"""A small sales report from a CSV file, with the standard library only.

    airlock run examples/sales.py --file examples/sales.csv
    airlock run examples/sales.py --file examples/sales.csv -- --top 5
"""

import argparse
import csv
import statistics
from collections import defaultdict
from datetime import date
from pathlib import Path


def read(path):
    with open(path, newline="", encoding="utf-8") as f:
        for row in csv.DictReader(f):
            yield date.fromisoformat(row["date"]), row["product"], row["region"], int(row["units"]) * float(row["price"])


def bar(value, largest, width=30):
    return "█" * max(1, round(width * value / largest))


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--top", type=int, default=3)
    options.add_argument("--file", default=Path(__file__).with_name("sales.csv"))
    options = options.parse_args()

    months, products, regions = defaultdict(float), defaultdict(float), defaultdict(float)
    orders = []
    for day, product, region, revenue in read(options.file):
        months[f"{day:%Y-%m}"] += revenue
        products[product] += revenue
        regions[region] += revenue
        orders.append(revenue)
    total = sum(orders)
    print(f"{len(orders)} orders, {total:,.2f} in all, median order {statistics.median(orders):,.2f}\n")

    print("Month        Revenue  Change")
    before = None
    for month, revenue in sorted(months.items()):
        change = "" if before is None else f"{100 * (revenue / before - 1):+.1f} %"
        print(f"{month}  {revenue:>10,.2f}  {change:>8}  {bar(revenue, max(months.values()))}")
        before = revenue

    print(f"\nTop {options.top} products")
    for product, revenue in sorted(products.items(), key=lambda p: -p[1])[: options.top]:
        print(f"  {product:<16} {revenue:>10,.2f}  {100 * revenue / total:>5.1f} %")

    print("\nRegions")
    for region, revenue in sorted(regions.items(), key=lambda p: -p[1]):
        print(f"  {region:<16} {revenue:>10,.2f}  {100 * revenue / total:>5.1f} %")

    series = [months[m] for m in sorted(months)]
    slope, start = statistics.linear_regression(range(len(series)), series)
    fit = statistics.correlation(range(len(series)), series) ** 2
    print(f"\nTrend: {slope:+,.2f} a month (R² {fit:.2f}); next month about {start + slope * len(series):,.2f}")


if __name__ == "__main__":
    main()
